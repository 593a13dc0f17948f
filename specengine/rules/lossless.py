"""Rules whose output has the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specengine.rules.base import Rule, Wants


@dataclass(frozen=True)
class Match(Rule):
    """Follows the tree while a child is the token that the target itself draws (its argmax at temperature 0).

    Guarantee: lossless; the same seed gives the same tokens with any drafter, any tree, and without a drafter.
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
    """Applies speculative sampling (Leviathan et al. 2023; siblings as in SpecInfer and Sequoia).

    It accepts a child with probability min(1, target_prob / draft_prob). After a rejection, siblings and the bonus
    token come from the residual distribution.
    Guarantee: lossless; the output has the target's distribution, and the text of a seed depends on the drafter.
    """

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True
    wants: ClassVar[Wants] = Wants.SAMPLES

    @property
    def neutral(self) -> Rule:
        return self


@dataclass(frozen=True)
class Traversal(Rejection):
    """Verifies from the leaves to the root (Weng et al. 2025, arXiv 2505.12398).

    A rejection deep in the tree raises the chance of the nodes above it.
    Guarantee: as `rejection`; it accepts at least as many tokens in expectation.
    """

    name: ClassVar[str] = "traversal"


@dataclass(frozen=True)
class Block(Rejection):
    """Verifies chains as one block (Sun et al. 2024, arXiv 2403.10444); `traversal` on a chain does the same.

    Trees with siblings are refused.
    Guarantee: as `rejection`; it accepts at least as many tokens in expectation. It needs a drafter that
    samples: of deterministic children it accepts no more than `rejection`.
    """

    name: ClassVar[str] = "block"
    chains_only: ClassVar[bool] = True
