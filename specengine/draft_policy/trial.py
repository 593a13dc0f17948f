"""When a drafter that drafts all or nothing should skip a cycle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.cycle_time import cycle_seconds, mean_prefix
from specengine.draft_trees.tree import DraftTree


class Trial:
    """Skips enough of a drafter's cycles to keep its losses at a fiftieth of the time.

    costs: of the target's passes.
    """

    _SHARE, _UNSURE, _MEMORY = 50, 20, 8

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._saved = 0.0  # recent mean saving of a drafted cycle, in plain cycles
        self._uses = 0
        self._read = 0.0  # plain cycles' time that prompts took since the last recorded draft
        self._left = 0
        self._open: tuple[int, float, float] | None = None

    def should_skip(self) -> bool:
        """Returns whether to skip this cycle; to be called once a cycle."""
        self._left -= 1
        return self._left >= 0

    def record_reading(self, requests: int, prefix: float, seconds: float) -> None:
        """Records a draft that read prompts: a loss where drafts do not pay, but no measure of the next draft."""
        self._read += seconds / cycle_seconds(self._costs, requests, 0, prefix)

    def record_draft(self, requests: int, nodes: int, prefix: float, seconds: float) -> None:
        """Records a draft. nodes: of all requests, roots excluded.  seconds: that it took."""
        plain = cycle_seconds(self._costs, requests, 0, prefix)
        self._open = requests, plain, cycle_seconds(self._costs, requests, nodes, prefix) + seconds

    def record_commit(self, tokens: int) -> None:
        """Records what the draft led to: committed tokens of all requests."""
        draft, self._open = self._open, None  # at once: engines in other threads may share the drafter
        if draft is None:
            return
        requests, plain, taken = draft
        saved = tokens / requests - taken / plain
        self._uses = min(self._uses + 1, self._MEMORY)
        self._saved += (saved - self._saved) / self._uses
        sure = self._uses / self._MEMORY  # one unlucky draft proves little, even less behind a long prompt
        share = self._UNSURE + sure * (self._SHARE - self._UNSURE)
        lost = sure**2 * self._read - self._saved
        self._left = ceil(share * lost) if self._saved < 0 and saved <= 0 else 0  # a gain is tried again at once
        self._read = 0.0


class TimedDrafts:
    """Times whole drafts for a Trial and makes plain cycles where the trial skips.

    costs: of the target's passes; None: every cycle drafts.
    """

    def __init__(self, costs: CostModel | None) -> None:
        self._trial = None if costs is None else Trial(costs)
        self._recorded = True  # whether the last draft was recorded as one

    def draft(
        self,
        requests: Sequence[Any],
        grow: Callable[[bool], list[DraftTree]],
        reads_prompt: Callable[[Any], bool] = lambda request: False,
    ) -> list[DraftTree]:
        """Returns the trees of a cycle. grow(skipped): draws them; skipped: the roots alone.

        reads_prompt(request): whether the next draft has to read the request's prompt.
        """
        if self._trial is None or not requests:
            return grow(False)
        began = time.perf_counter()
        skipped = self._trial.should_skip()
        reads = not skipped and any(reads_prompt(request) for request in requests)
        trees = grow(skipped)
        if skipped:
            return trees
        # A prompt is read once and does not predict the next cycle. Where every cycle reads one, it does.
        self._recorded = not (reads and self._recorded)
        seconds = time.perf_counter() - began
        prefix = mean_prefix(requests)
        if self._recorded:
            nodes = sum(len(tree.tokens) for tree in trees) - len(trees)
            self._trial.record_draft(len(requests), nodes, prefix, seconds)
        else:
            self._trial.record_reading(len(requests), prefix, seconds)
        return trees

    def observe(self, committed: Sequence[list[int]]) -> None:
        """Records the committed tokens of a cycle."""
        if self._trial is not None:
            self._trial.record_commit(sum(map(len, committed)))
