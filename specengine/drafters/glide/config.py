"""The options of the drafter glide."""

from __future__ import annotations

from dataclasses import dataclass

from specengine._C import MAX_NODES
from specengine.draft_trees.shapes import Beam
from specengine.utils.spec_string import check_range

# CAPE: siblings beside the greedy token, by its probability: 7 up to 0.3, 5 up to 0.6, 3 up to 0.8, otherwise 1.
THRESHOLDS = (0.3, 0.6, 0.8)
WIDTHS = (8, 6, 4, 2)


@dataclass(frozen=True)
class Config:
    """The options.

    length: tokens drafted one after another.  cape: give them siblings; without, the draft is a chain.
    cross: attend to the target's cache; without (an ablation) the drafter is an ordinary small model.
    adaptive: stop drafting where the next pass would not pay, and keep the nodes that do. Any choice is lossless under
    the rule `match`.  dtype: of the drafter's weights, as the engine's.
    sample: draw the children from the drafter's distribution, for rules that read it.
    """

    length: int = 4
    cape: bool = True
    cross: bool = True
    adaptive: bool = True
    dtype: str = "auto"
    sample: bool = False

    def __post_init__(self) -> None:
        check_range("length", self.length, 1, (MAX_NODES - 1) // (WIDTHS[0] if self.cape else 1))

    @property
    def shape(self) -> Beam:
        """The shape of its trees: the likeliest node of a level has children."""
        if not self.cape:
            return Beam(self.length, 1)
        return Beam(self.length, WIDTHS[0], widths=WIDTHS, thresholds=THRESHOLDS)
