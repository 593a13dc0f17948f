"""The options of the drafter draft_model, and checks that other drafters by a small model share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from specengine._C import MAX_NODES
from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.shapes import Beam, Ranks, just_below
from specengine.utils.spec_string import check_range


def check_noise(noise: float) -> None:
    """Raises ValueError for a noise that is no share of the temperature."""
    if noise != 0 and not 0.01 <= noise <= 1:
        raise ValueError(f"noise: expected 0 or a number from 0.01 to 1, got {noise!r}")


@dataclass(frozen=True)
class Config:
    """The options.

    length: tokens of the chain drafted.  tree: instead of a chain, the children of each node by level, as 3x2x1.
    replacement: siblings are drawn with replacement, where a rule wants them sampled.
    noise: where the rule wants no samples, children are drawn as `match` would draw from the draft model, at `noise`
    times the temperature. The noise is that of the target's own draw. The worse the two models agree, the less noise
    is best. With 0 the likeliest tokens are drafted at any temperature; that suits `margin:strict`.
    confidence: nothing is drafted behind a node whose likeliest continuation has a lower probability, by the draft
    model's unprocessed logits. That is known before any child is drawn, so it cannot bias a rule.
    layers: the number of the model's first layers to use; 0: all.  dtype: of a model that is loaded, as the engine's.
    adaptive: where the rule wants no samples, skip cycles in which drafting does not pay.
    """

    length: int = 4
    tree: str = ""
    replacement: bool = False
    noise: float = 0.75
    confidence: float = 0.0
    layers: int = 0
    dtype: str = "auto"
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_range("length", self.length, 1, MAX_NODES - 1)
        check_range("layers", self.layers, 0, 10_000)
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence: expected a probability, got {self.confidence!r}")
        check_noise(self.noise)
        if not re.fullmatch(r"([1-9]\d{0,2}(x[1-9]\d{0,2})*)?", self.tree):
            raise ValueError(f"tree: expected the children of each node by level, such as 3x2x1, got {self.tree!r}")
        if self.nodes > MAX_NODES:
            raise ValueError(
                f"tree: {self.tree} has {self.nodes} nodes with its root, at most {MAX_NODES} are possible"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Children of each node by level."""
        return tuple(int(width) for width in self.tree.split("x")) if self.tree else (1,) * self.length

    @property
    def shape(self) -> Beam | Ranks:
        """The shape of its trees."""
        most = max(self.widths)
        widths, thresholds = ((0, most), (just_below(self.confidence),)) if self.confidence else ((), ())
        if most == 1:
            return Beam(len(self.widths), 1, widths=widths, thresholds=thresholds)
        return Ranks(RankTree.of_widths(self.widths), widths, thresholds)

    @property
    def sample(self) -> bool:
        """Whether children are drawn for rules that take others too: they always are."""
        return True

    @property
    def nodes(self) -> int:
        """Nodes of the whole tree, root included."""
        return 1 + sum(accumulate(self.widths, mul))
