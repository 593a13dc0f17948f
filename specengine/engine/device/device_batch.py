"""Requests that share cycles on the device; the same interface as batch.Batch has for the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from specengine.constraints import Constraint
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.drafter import Drafter
from specengine.engine.batch import commit_path, slots_in_flux
from specengine.engine.device.buffers import DeviceBuffers
from specengine.engine.device.cycle_graphs import CycleGraphs
from specengine.engine.device.slots import DeviceSlots
from specengine.engine.request import NoToken, Request
from specengine.ops.commit_tokens import RECORD_HEAD
from specengine.rules.base import Wants
from specengine.utils.timers import HostClock


class Runner(Protocol):
    """What a batch uses of the runner; see DeviceRunner."""

    buffers: DeviceBuffers
    graphs: CycleGraphs
    drafter: Drafter
    wants: Wants
    slots: DeviceSlots
    loaded: DeviceBatch | None

    def launch(
        self, size: int, nodes: int, constraints: Sequence[Constraint | None] = ()
    ) -> Callable[[], list[list[int]]]: ...


class DeviceBatch:
    """Keeps the device busy with the next cycle while the host commits the last one."""

    def __init__(self, requests: Sequence[Request], runner: Runner) -> None:
        self.requests, self._runner = list(requests), runner
        drafter = runner.drafter
        self._constrained = any(r.constraint is not None for r in requests)
        self._drafts_in_cycles = drafter.drafts_in_cycle
        self._reads = drafter.reads_hidden_states
        # The host must see these cycles before the next one begins, so none runs ahead.
        waits = self._constrained or any(r.params.logprobs for r in requests)
        self._in_flight = 1 if waits or (self._reads and not self._drafts_in_cycles) else 2
        self._drafts: deque[Draft] = deque()  # of the cycles under way, where the host drafts
        self._rest = 0  # cycles for which the drafter need not be asked
        self._slots: list[int] = []  # of the requests, while they are loaded
        self._launched: deque[Callable[[], list[list[int]]]] = deque()
        self._read: deque[list[list[int]]] = deque()
        self._clock = HostClock()

    def step(self) -> dict[str, float]:
        """Commits one cycle and launches the next one.

        Returns the seconds of its phases; empty where one of the requests had ended before.
        """
        with slots_in_flux(self.requests):
            if not self._load():
                return {}
            self._clock = HostClock()
            while len(self._launched) < (self._in_flight if self._drafts_in_cycles or self._rest else 1):
                self._launch()
            self._clock.mark("host")
            records = self._launched.popleft()()
            self._clock.mark("verify")  # the wait for the whole cycle; DeviceRunner.timed() tells its phases apart
            self._commit(records)
            for request in self.requests:
                request.stats.count_time(self._clock.seconds, finished=bool(request.finish_reason))
            return self._clock.seconds

    def close(self) -> None:
        """Commits the cycles under way, before the set of requests changes; who has ended leaves its slot."""
        if self._runner.loaded is self:
            self.leave()
        while self._read:
            self._commit(self._read.popleft())
        self._runner.slots.take_out([request for request in self.requests if request.finish_reason])

    def leave(self) -> None:
        """Waits for the cycles under way; the caller of these requests commits them later.

        The requests keep their slots until another batch is loaded.
        """
        while self._launched:
            self._read.append(self._launched.popleft()())
        self._runner.loaded = None

    def _load(self) -> bool:
        """Loads the requests where another batch is loaded; returns False where one of them has ended."""
        runner = self._runner
        if runner.loaded is self:
            return True
        if runner.loaded:
            runner.loaded.leave()
        while self._read:  # cycles from before another batch took the device
            self._commit(self._read.popleft())
        if any(r.finish_reason for r in self.requests):
            return False
        self._slots = runner.slots.place(self.requests, runner.graphs.bucket(len(self.requests)))
        runner.loaded = self
        return True

    @property
    def _size(self) -> int:
        """The slots of a cycle."""
        return max(self._slots) + 1

    def _launch(self) -> None:
        runner, size = self._runner, self._size
        nodes = runner.graphs.choose(size) if self._drafts_in_cycles else self._draft(size)
        self._launched.append(runner.launch(size, nodes, self._constraints()))

    def _draft(self, size: int) -> int:
        """Drafts on the host, unless the drafter rests; returns the width of the cycle."""
        runner = self._runner
        if self._rest:
            self._rest -= 1
            draft = Draft(self.requests, [DraftTree(r.tokens[-1:], [-1]) for r in self.requests])
        else:
            draft = runner.drafter.draft_for(runner.wants, self.requests)
            self._rest = draft.rest
        nodes = runner.graphs.width_for(size, max(len(tree.tokens) for tree in draft.trees))
        if nodes > 1 or draft.logits:  # the device knows the roots
            runner.graphs.of(size, nodes, self._constrained).take(draft, self._slots)
        self._drafts.append(draft)
        self._clock.mark("draft")
        return nodes

    def _constraints(self) -> list[Constraint | None]:
        """Returns the constraints of all slots, none where no request has one."""
        by_slot = dict(zip(self._slots, self.requests, strict=True))
        slots = range(self._size) if self._constrained else ()
        return [by_slot[slot].constraint if slot in by_slot else None for slot in slots]

    def _commit(self, records: list[list[int]]) -> None:
        """Commits one cycle from its records; see ops.commit_tokens for their columns."""
        committed: list[list[int]] = []
        rows: list[int] = []
        nodes = (len(records[0]) - RECORD_HEAD) // 3
        graphs = self._runner.graphs
        logits_of = partial(graphs.logits, graphs.of(self._size, nodes, self._constrained))
        for b, (request, slot) in enumerate(zip(self.requests, self._slots, strict=True)):
            record = records[slot]
            if request.finish_reason:  # a stop string, cancellation or deadline: the device was ahead
                committed.append([])
                continue
            _, count, bonus, relaxed = record[:RECORD_HEAD]
            columns = record[RECORD_HEAD:]
            path, tokens, parents = (columns[i * nodes : (i + 1) * nodes] for i in range(3))
            if bonus < 0:
                request.fail(NoToken(self._no_token(b, count)))
                committed.append([])
                continue
            used = tokens.index(-1) if -1 in tokens else nodes
            tree = DraftTree(tokens[:used], parents[:used])
            committed.append(commit_path(request, tree, path[:count], bonus, logits_of, slot * nodes, relaxed))
            rows += [slot * nodes + node for node in path[: len(committed[-1])]]
            graphs.observe(nodes, tree.levels, count - 1)
        if not self._drafts_in_cycles:
            self._observe(nodes, committed, rows)

    def _observe(self, nodes: int, committed: list[list[int]], rows: list[int]) -> None:
        """Shows a drafter on the host what was committed.  rows: of the accepted nodes."""
        drafter, draft = self._runner.drafter, self._drafts.popleft()
        batch = self._runner.graphs.of(self._size, nodes, self._constrained)
        self._clock.mark("host")
        if drafter.reads_choices and nodes > 1:
            chosen = batch.choices.tolist()
            choices = [chosen[slot * nodes : (slot + 1) * nodes] for slot in self._slots]
            drafter.observe_choices(draft, committed, choices)
        drafter.observe(draft, committed, batch.hidden_states.rows(rows) if self._reads else None)
        self._clock.mark("draft")

    def _no_token(self, b: int, count: int) -> str:
        position = len(self.requests[b].tokens) + count - 1
        drafts = "" if self._runner.wants is Wants.NOTHING else " (or its draft_logits have)"
        masks = ", or its mask allows no token" if self.requests[b].constraint is not None else ""
        what = f"NaN or infinite scores{drafts}{masks}"
        return f"logits: request {b}, position {position} has {what}: no token can be drawn"
