"""What drafters share whose nodes have chances: the largest tree is drafted, and the nodes that pay are kept."""

from __future__ import annotations

import time
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from specengine.draft_policy.acceptance_watch import AcceptanceWatch
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.overhead import Overhead
from specengine.draft_policy.pauses import Pauses
from specengine.draft_policy.tree_choice import Acceptance, cycle_seconds
from specengine.draft_trees.scored_tree import ScoredTree, cut_trees, judged
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.base import Drafter

# Drafters are surer of themselves than they should be, or less: how often a node is accepted is learned by classes of
# what its drafter gave it. Class i reaches from EDGES[i - 1] to EDGES[i].
EDGES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))


class Calibration:
    """What a drafter's probabilities turned out to mean. drafter: whose they are, for a warning."""

    def __init__(self, drafter: str = "the drafter") -> None:
        self._acceptance, self._watch = Acceptance(MIDDLES, weight=20, memory=1000), AcceptanceWatch(drafter)

    def __call__(self, chances: Sequence[float]) -> list[float]:
        """How often nodes with such chances are accepted once their parent is."""
        rates = self._acceptance.rates()
        return [rates[bisect_right(EDGES, chance)] for chance in chances]

    def observe(self, tree: ScoredTree, committed: Sequence[int]) -> None:
        """Learns from what the text is: committed holds the accepted tokens and the one after them.

        tree: with the drafter's own chances and all of its nodes but the rarest: those that were never verified count
        too, or what was once found not to pay could not be found out to pay after all.
        """
        taken = False
        for node, accepted in judged(tree, committed):
            self._acceptance.observe(bisect_right(EDGES, tree.chances[node]), accepted)
            taken |= accepted
        if len(tree.tokens) > 1 and committed:
            self._watch.observe(taken)


class ScoredDrafter(Drafter):
    """A subclass sets `_costs` (of a target pass; None: trees stay whole) and keeps `drafted` in its states."""

    proposes = True
    _costs: CostModel | None

    def __init__(self, config, path: str | None, target) -> None:
        super().__init__(config, path, target)
        self._calibration, self._pauses, self._overhead = Calibration(self.name), Pauses(), Overhead()

    @abstractmethod
    def grow(self, requests: Sequence) -> list[ScoredTree]:
        """The largest tree of every request, with the drafter's own chances; the root alone where there is none."""

    def propose(self, requests: Sequence) -> list[ScoredTree]:
        trees = self.grow(requests)
        for request, tree in zip(requests, trees, strict=True):
            if request.drafter_state is not None:
                request.drafter_state.drafted = tree
        return [replace(tree, chances=self._calibration(tree.chances)) for tree in trees]

    def draft(self, requests: Sequence) -> list[DraftTree]:
        begin = self._overhead.begin(requests)
        if self._pauses.here(len(requests)):
            self.rest(requests)
            trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        else:
            trees = self.propose(requests)
        count, prefix = len(trees), sum(len(request.tokens) for request in requests) / max(1, len(requests))
        cut = cut_trees(trees, self._costs, prefix)
        if self._costs is not None and count:
            seconds = cycle_seconds(self._costs, count, cut.nodes, prefix) + time.perf_counter() - begin
            drafted = any(len(tree.tokens) > 1 for tree in trees)
            self._overhead.expect(requests, drafted, begin, seconds)
            if drafted:
                plain = cycle_seconds(self._costs, count, 0, prefix)
                alone = (plain + self._overhead[False]) * cut.expected / count
                saved = alone - seconds - self._overhead[True]
                self._pauses.weigh(count, saved, plain)
                self.credit(requests, saved)
        return cut.trees

    def rest(self, requests: Sequence) -> None:
        for request in requests:
            if request.drafter_state is not None:
                request.drafter_state.drafted = None

    def _learn(self, request, committed: Sequence[int]) -> None:
        """Compares what was drafted of a request with its text."""
        state = request.drafter_state
        if state is not None and state.drafted is not None:
            self._calibration.observe(state.drafted, committed)
