"""Rules whose output is the target's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specengine.rules.base import Rule, Wants


@dataclass(frozen=True)
class Match(Rule):
    """Follows the tree while it holds the token that the target itself draws (plain argmax at temperature 0).

    Guarantee: lossless; the same seed gives the same tokens with any drafter, any tree, or none.
    """

    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True

    @property
    def neutral(self) -> Rule:
        return self

    @property
    def reads_logits(self) -> bool:
        return False


@dataclass(frozen=True)
class Rejection(Rule):
    """Speculative sampling: a child is followed with probability min(1, target_prob / draft_prob), else its siblings
    and the bonus token come from the residual (Leviathan et al. 2023; siblings as in SpecInfer and Sequoia).

    Guarantee: lossless; the output has the target's distribution, but which text a seed gives depends on the drafter.
    """

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True
    wants: ClassVar[Wants] = Wants.SAMPLES

    @property
    def neutral(self) -> Rule:
        return self


@dataclass(frozen=True)
class Traversal(Rejection):
    """From the leaves to the root: what is refused deep in the tree raises the chance of what is above it
    (Weng et al. 2025, arXiv 2505.12398). Guarantee: as `rejection`, and accepts at least as much in expectation."""

    name: ClassVar[str] = "traversal"


@dataclass(frozen=True)
class Block(Rejection):
    """Block verification of chains (Sun et al. 2024, arXiv 2403.10444): what `traversal` is on them; trees are refused.

    Guarantee: as `rejection`, and accepts at least as much in expectation. Wants a drafter with true distributions:
    of deterministic children it accepts no more than `rejection`.
    """

    name: ClassVar[str] = "block"
    chains_only: ClassVar[bool] = True
