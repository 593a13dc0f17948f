"""The draft of a cycle: what a drafter returns, a batch verifies, and the drafter observes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specengine.draft_policy.cost_model import UNKNOWN, Curve
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftLogits, DraftTree


class Step(NamedTuple):
    """What a source did in a cycle.

    ready: requests that it drafted for.  drafted: its own trees.  trees: of all sources so far, cut.
    expected: tokens of the trees by their chances; None: what is accepted counts.
    """

    source: int
    ready: int
    drafted: list[ScoredTree]
    levels: int
    trees: list[DraftTree]
    seconds: float
    expected: float | None = None


@dataclass
class Draft:
    """The trees of a cycle, one per request, and what the draft policy noted of it.

    logits: the distributions of the drafted tokens, where the rule reads them.
    experts: that each layer read in the cycle's pass, in the mean; None: without counts.
    began: the policy's clock at the beginning; None: nothing is learned from the cycle.
    rest: cycles to come, of the same requests, for which the drafter need not be asked: their trees are roots alone.
    prefix: tokens in the cache, the mean of the requests.  seconds: of the cycle without its drafting, by its nodes.
    """

    requests: Sequence[Any]
    trees: list[DraftTree]
    logits: DraftLogits | None = None
    experts: float | None = None
    began: float | None = None
    rest: int = 0
    prefix: float = 0.0
    seconds: Curve = UNKNOWN
    steps: list[Step] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        """Nodes of all trees, roots excluded."""
        return sum(len(tree.tokens) - 1 for tree in self.trees)

    def add(self, step: Step) -> None:
        """Adds what a source drafted."""
        self.steps.append(step)
        self.trees = step.trees
