"""The trees of a drafter with probabilities of its own, with the chances that were learned for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specengine.draft_policy.acceptance import Calibration
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.drafters.acceptance_watch import AcceptanceWatch
from specengine.drafters.engine_views import DraftRequest


class CalibratedTrees:
    """Calibrates the trees of one drafter, and keeps each request's last tree to learn from.

    drafter: its name, for a warning.
    """

    def __init__(self, drafter: str) -> None:
        self._calibration = Calibration()
        self._watch = AcceptanceWatch(drafter)

    @property
    def learned(self) -> list[list[float]]:
        """See NetworkDrafter.learned."""
        return self._calibration.learned

    def calibrate(self, requests: Sequence[DraftRequest], trees: Sequence[ScoredTree]) -> list[ScoredTree]:
        """Returns the trees with learned chances; keeps the drafter's own for learn()."""
        for request, tree in zip(requests, trees, strict=True):
            request.drafter_states[self] = tree
        return [replace(tree, chances=self._calibration(tree.chances)) for tree in trees]

    def forget(self, requests: Sequence[DraftRequest]) -> None:
        """Drops the last draft of requests: this cycle drafts nothing for them."""
        for request in requests:
            request.drafter_states.pop(self, None)

    def learn(self, request: DraftRequest, committed: Sequence[int]) -> None:
        """Compares a request's last draft with its committed tokens: the accepted ones and the bonus token."""
        tree: ScoredTree | None = request.drafter_states.pop(self, None)
        if tree is None:
            return
        guessed = self._calibration.observe(tree, committed)
        if len(tree.tokens) > 1 and committed:
            self._watch.observe(guessed)
