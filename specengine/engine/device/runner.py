"""Batches whose cycles run on the device: the host replays a graph and reads what was committed one cycle behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from specengine.draft_trees.tree import DraftTree
from specengine.drafters.base import Drafter
from specengine.drafters.capabilities import (
    ChoiceReader,
    DeviceDrafter,
    DeviceStateDrafter,
    HiddenStateReader,
    draft_for_rule,
)
from specengine.engine.batch import commit_run, likeliest_tokens, whole_cycle
from specengine.engine.device.buffers import DeviceBuffers
from specengine.engine.device.cycle_graphs import CycleGraphs
from specengine.engine.request import Request
from specengine.ops.commit_tokens import RECORD_HEAD, record_width
from specengine.rules.base import Wants
from specengine.utils.timers import HostClock

RING = 4  # records on the host; two cycles are in flight at most


class DeviceRunner:
    """The device side of an engine: its state, its graphs, the ring of records, and whose requests are loaded."""

    def __init__(self, state: DeviceBuffers, graphs: CycleGraphs, drafter: Drafter, wants: Wants) -> None:
        self.state, self.graphs, self.drafter, self.wants = state, graphs, drafter, wants
        self.loaded: DeviceBatch | None = None
        largest = max(size * record_width(nodes) for size, nodes in graphs.slots)
        pinned = state.device.type == "cuda"
        self._ring = [torch.zeros(largest, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._written = [torch.cuda.Event() if pinned else None for _ in range(RING)]
        self._launched = 0

    def batch(self, requests: Sequence[Request]) -> DeviceBatch:
        return DeviceBatch(requests, self)

    @contextmanager
    def timed(self) -> Iterator[list[dict[str, float]]]:
        """Meanwhile cycles wait for each other; gives the seconds by phase that each of them took on the device.

        To be entered and left between two batches.
        """
        plain, self.graphs = self.graphs, self.graphs.clocked()
        try:
            yield self.graphs.timings
        finally:
            self.graphs = plain

    def launch(self, size: int, nodes: int) -> Callable[[], list[list[int]]]:
        """Starts a cycle; the result waits for it and gives one record per slot."""
        slots = self.graphs.run(size, nodes)
        turn = self._launched % RING
        self._launched += 1
        record, event = self._ring[turn][: slots.record.numel()].view(slots.record.shape), self._written[turn]
        record.copy_(slots.record, non_blocking=True)
        if event:
            event.record()

        def read() -> list[list[int]]:
            if event:
                event.synchronize()
            return record.tolist()

        return read


class DeviceBatch:
    """Requests that share cycles on the device; has the interface of batch.Batch."""

    def __init__(self, requests: Sequence[Request], cycles: DeviceRunner) -> None:
        self.requests, self._cycles = list(requests), cycles
        # What the host must see of every cycle before the next one begins leaves nothing to run ahead of.
        waits = not isinstance(cycles.drafter, DeviceDrafter) or any(s.params.logprobs for s in requests)
        self._ahead = 1 if waits else 2
        self._launched: deque[Callable[[], list[list[int]]]] = deque()
        self._read: deque[list[list[int]]] = deque()
        self._clock = HostClock()  # of the step under way

    def step(self) -> dict[str, float]:
        """Commits one cycle, and keeps the device busy with the next one meanwhile.

        Gives the seconds its phases took; empty where one of the requests had ended before.
        """
        with whole_cycle(self.requests):
            return self._step()

    def _step(self) -> dict[str, float]:
        cycles = self._cycles
        if cycles.loaded is not self:
            if cycles.loaded:
                cycles.loaded.leave()
            while self._read:  # cycles from before another batch took the device
                self._commit(self._read.popleft())
            if self._finished:
                return {}
            cycles.state.load(self.requests)
            if isinstance(cycles.drafter, DeviceStateDrafter):
                cycles.drafter.load(cycles.state.drafter_state, self.requests)
            cycles.loaded = self
        self._clock = HostClock()
        while len(self._launched) < self._ahead:
            self._launch()
        self._clock.mark("host")
        records = self._launched.popleft()()
        self._clock.mark("verify")  # the wait for the whole cycle; see timed()
        self._commit(records)
        for request in self.requests:
            request.count_time(self._clock.seconds)
        return self._clock.seconds

    def close(self) -> None:
        """Commits what is still under way: the members are about to change."""
        if self._cycles.loaded is self:
            self.leave()
        while self._read:
            self._commit(self._read.popleft())

    def leave(self) -> None:
        """Waits for all cycles under way and leaves the device; what they did is committed by the caller whose
        requests these are."""
        while self._launched:
            self._read.append(self._launched.popleft()())
        cycles = self._cycles
        if isinstance(cycles.drafter, DeviceStateDrafter):
            cycles.drafter.unload(cycles.state.drafter_state, self.requests)
        cycles.loaded = None

    @property
    def _finished(self) -> bool:
        return any(s.finish_reason for s in self.requests)

    def _launch(self) -> None:
        cycles, size = self._cycles, len(self.requests)
        if isinstance(cycles.drafter, DeviceDrafter):
            nodes = cycles.graphs.choose(size)
        else:
            trees, logits = draft_for_rule(cycles.drafter, cycles.wants, self.requests)
            nodes = cycles.graphs.width_for(size, max(len(tree.tokens) for tree in trees))
            cycles.graphs.of(size, nodes).take(trees, logits)
            self._clock.mark("draft")
        self._launched.append(cycles.launch(size, nodes))

    def _commit(self, records: list[list[int]]) -> None:
        committed: list[list[int]] = []
        kept: list[int] = []
        nodes = (len(records[0]) - RECORD_HEAD) // 3
        graphs = self._cycles.graphs
        for b, (request, record) in enumerate(zip(self.requests, records, strict=False)):
            if request.finish_reason:  # by a stop string, which only the host can see: the device was one cycle ahead
                committed.append([])
                continue
            _, count, bonus, relaxed = record[:RECORD_HEAD]
            rows = record[RECORD_HEAD:]
            path, tokens, parents = (rows[i * nodes : (i + 1) * nodes] for i in range(3))
            if bonus < 0:
                position = len(request.tokens) + count - 1
                where = f"request {b}, position {position}"
                other = "" if self._cycles.wants is Wants.NOTHING else " (or its draft_logits have)"
                raise ValueError(f"logits: {where} has NaN or infinite scores{other}, so there is no token to draw")
            used = tokens.index(-1) if -1 in tokens else nodes
            tree = DraftTree(tokens[:used], parents[:used])
            scores = graphs.of(len(self.requests), nodes).scores
            committed.append(commit_run(request, tree, path[:count], bonus, scores, b * nodes, relaxed))
            kept += [b * nodes + node for node in path[: len(committed[-1])]]
            graphs.observe(nodes, used - 1, count - 1)
        drafter = self._cycles.drafter
        if not isinstance(drafter, DeviceDrafter):
            self._clock.mark("host")
            slots = graphs.of(len(self.requests), nodes)
            if isinstance(drafter, ChoiceReader):
                said = likeliest_tokens(slots.scores)
                choices = [said[first : first + nodes] for first in range(0, len(said), nodes)]
                drafter.observe_choices(self.requests, committed, choices)
            reads = isinstance(drafter, HiddenStateReader) and drafter.reads_hidden_states
            hidden_states = slots.hidden_states if reads else None
            drafter.observe(self.requests, committed, hidden_states and hidden_states.rows(kept))
            self._clock.mark("draft")
