"""How large the trees of a drafter with scored nodes become, cycle by cycle: skip, draft, calibrate, cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from specengine.draft_policy.calibration import Calibration
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.cut_trees import cut_trees
from specengine.draft_policy.cycle_time import cycle_seconds, mean_prefix
from specengine.draft_policy.overhead import Overhead
from specengine.draft_policy.pauses import Pauses
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree


class ScoredTreeSource(Protocol):
    """A drafter whose nodes have chances, as TreeSizing sees it; drafters.capabilities.ScoredDrafter implements it."""

    def propose(self, requests: Sequence[Any]) -> list[ScoredTree]: ...

    def skip(self, requests: Sequence[Any]) -> None: ...

    def record_gain(self, requests: Sequence[Any], saved: float) -> None: ...


class TreeSizing:
    """Decides in which cycles a drafter drafts, and how many nodes of its largest tree are verified.

    costs: of a target pass; None: every cycle drafts, and trees stay whole.  drafter: its name, for a warning.
    A request's drafter_state, where there is one, has a field `drafted: ScoredTree | None`.
    """

    def __init__(self, costs: CostModel | None, drafter: str) -> None:
        self.costs = costs
        self.calibration = Calibration(drafter)
        self.pauses = Pauses()
        self.overhead = Overhead()

    def draft(self, drafter: ScoredTreeSource, requests: Sequence[Any]) -> list[DraftTree]:
        """Returns the drafter's trees of a cycle, cut to the nodes that pay."""
        begin = self.overhead.begin(requests)
        if self.pauses.should_skip(len(requests)):
            drafter.skip(requests)
            trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        else:
            trees = drafter.propose(requests)
        count = len(trees)
        prefix = mean_prefix(requests)
        cut = cut_trees(trees, self.costs, prefix)
        if self.costs is not None and count:
            seconds = cycle_seconds(self.costs, count, cut.nodes, prefix) + time.perf_counter() - begin
            drafted = any(len(tree.tokens) > 1 for tree in trees)
            self.overhead.expect(requests, drafted, begin, seconds)
            if drafted:
                plain = cycle_seconds(self.costs, count, 0, prefix)
                alone = (plain + self.overhead[False]) * cut.expected / count
                saved = alone - seconds - self.overhead[True]
                self.pauses.record_saving(count, saved, plain)
                drafter.record_gain(requests, saved)
        return cut.trees

    def calibrate(self, requests: Sequence[Any], trees: Sequence[ScoredTree]) -> list[ScoredTree]:
        """Returns the trees with learned chances; keeps the drafter's own for learn()."""
        for request, tree in zip(requests, trees, strict=True):
            if request.drafter_state is not None:
                request.drafter_state.drafted = tree
        return [replace(tree, chances=self.calibration(tree.chances)) for tree in trees]

    def forget(self, requests: Sequence[Any]) -> None:
        """Drops the last draft of requests: this cycle drafts nothing for them."""
        for request in requests:
            if request.drafter_state is not None:
                request.drafter_state.drafted = None

    def learn(self, request: Any, committed: Sequence[int]) -> None:
        """Compares a request's last draft with its committed tokens."""
        state = request.drafter_state
        if state is not None and state.drafted is not None:
            self.calibration.observe(state.drafted, committed)
