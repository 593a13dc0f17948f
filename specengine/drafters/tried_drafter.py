"""Drafters that draft all or nothing: cycles in which that does not pay are plain ones."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specengine.draft_policy.cost_model import CostModel, costs_of
from specengine.draft_policy.pauses import Trial
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.base import Drafter

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer


class TriedDrafter(Drafter):
    """Its Config has adaptive; else, and on CUDA, where graphs choose, it drafts in every cycle."""

    _trial: Trial | None = None
    _judged = True  # whether the last draft was

    def _try(self, target: Transformer, costs: CostModel | None) -> None:
        """costs: of the target's passes; None: measured."""
        if self.config.adaptive and not target.ops.resident:
            self._trial = Trial(costs or costs_of(target))

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @abstractmethod
    def _trees(self, requests: Sequence, paused: bool) -> list[DraftTree]:
        """As draft(); paused: the roots alone."""

    def _reads_prompt(self, request) -> bool:
        """Whether its next draft has to read the request's prompt."""
        return False

    def draft(self, requests: Sequence) -> list[DraftTree]:
        return self._tried(requests, self._trees)

    def _tried(self, requests: Sequence, draw: Callable[[Sequence, bool], list[DraftTree]]) -> list[DraftTree]:
        """draft(), by what draws the trees as _trees() does."""
        if self._trial is None or not requests:
            return draw(requests, False)
        began, paused = time.perf_counter(), self._trial.here()
        reads = not paused and any(self._reads_prompt(request) for request in requests)
        trees = draw(requests, paused)
        if paused:
            return trees
        # A prompt is read once, which says nothing of the next cycle; where every cycle has one, it does.
        self._judged = not (reads and self._judged)
        seconds = time.perf_counter() - began
        prefix = sum(len(request.tokens) for request in requests) / len(requests)
        if self._judged:
            nodes = sum(len(tree.tokens) for tree in trees) - len(trees)
            self._trial.drafted(len(requests), nodes, prefix, seconds)
        else:
            self._trial.read(len(requests), prefix, seconds)
        return trees

    def observe(self, requests: Sequence, committed: Sequence[list[int]], hidden_states) -> None:
        if self._trial is not None:
            self._trial.committed(sum(map(len, committed)))
