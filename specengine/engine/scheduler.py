"""The scheduler: its queue, the admission of requests, and the step that runs one cycle of those admitted."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from specengine.engine.batch import Batch
from specengine.engine.core import EngineCore
from specengine.engine.device.device_batch import DeviceBatch
from specengine.engine.prefill import Prefill
from specengine.engine.request import Request

WAIT_SECONDS = 0.001  # between two looks at pages that other schedulers hold


class Scheduler:
    """Runs requests first come, first served; they join and leave the batch between two cycles. For one thread.

    max_prefill_rows: prompt tokens between two cycles, or one pass of more; bounds the pause of running requests.
    pauses: whether the step should end before its next prefill pass.
    An exception ends only the requests of the failing step, with finish_reason `error`, and is raised.
    """

    def __init__(
        self, core: EngineCore, max_prefill_rows: float = math.inf, pauses: Callable[[], bool] = lambda: False
    ) -> None:
        self._core, self._max_prefill_rows, self._pauses = core, max_prefill_rows, pauses
        self._waiting: deque[Request] = deque()
        self._prefill = Prefill(core)
        self._running: list[Request] = []
        self._batch: Batch | DeviceBatch | None = None
        self._ended: list[Request] = []  # since the last step

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        """Requests with a place in the batch."""
        return len(self._running) + len(self._prefill.requests)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._waiting or self._prefill.requests or self._running)

    def add(self, requests: Sequence[Request]) -> None:
        """Puts requests at the end of the queue."""
        self._core.metrics.submitted(len(requests))
        self._waiting.extend(requests)

    def finish(self, requests: Iterable[Request], reason: str) -> None:
        """Ends requests between two cycles; EngineCore.release hands back their drafter state and queues their pages.

        Where a running request ends, closes the batch first: on a device that waits for the cycles under way.
        """
        for request in requests:
            if not request.finish_reason:
                request.finish(reason)
        queue, self._waiting = self._waiting, deque(r for r in self._waiting if not r.finish_reason)
        self._record_end((r for r in queue if r.finish_reason), admitted=False)
        self._release(self._prefill.take_ended())
        self._remove_finished()

    def step(self) -> list[Request]:
        """Admits and prefills, runs one cycle, and returns the requests that took part or ended since the last step.

        Waits a moment instead where other schedulers hold the pages that the first request needs.
        """
        self._admit_and_prefill()
        if self._running:
            self._run_cycle()
            self._remove_finished()
        elif self._waiting and not self._prefill.requests:
            time.sleep(WAIT_SECONDS)
        if not self.has_unfinished_requests:
            self._core.rest()
        ended, self._ended = self._ended, []
        return ended + self._running

    def close(self) -> None:
        """Drops all requests by EngineCore.release, without closing the batch.

        Takes neither turn nor lock: the garbage collector may close an abandoned stream in the middle of a cycle of
        this thread. On a device the next batch waits for the cycles under way.
        """
        self._record_end(self._waiting, admitted=False)
        self._waiting.clear()
        self._release(self._prefill.take_all())
        self._release(self._running)
        self._batch = None

    def _admit_and_prefill(self) -> None:
        rows = 0
        while not self._pauses():
            while self._prefill.has_room and self._admit():
                pass
            if rows and rows + self._prefill.next_rows > self._max_prefill_rows:
                break
            with self._fatal_to(self._prefill.next_requests()):
                passed = self._prefill.run()
            rows += passed
            cached = self._prefill.take_cached()
            if cached:
                self._close_batch()
                self._running += cached
            elif not passed:
                break

    def _admit(self) -> bool:
        """Gives the first request that gains nothing from waiting its pages, if there is room."""
        core, admitted = self._core, [*self._running, *self._prefill.requests]
        if len(admitted) == core.max_batch_size:
            return False
        waiting = ((i, r) for i, r in enumerate(self._waiting) if not self._prefill.fills_pages_of(r))
        number, request = next(waiting, (0, None))
        if request is None:
            return False
        with core.turn():  # no other scheduler may take the room between the check and the allocation
            if not core.has_room(request, admitted):
                return False
            del self._waiting[number]
            core.metrics.admitted(request)
            with self._fatal_to([request]):
                core.allocate(request, min(core.max_batch_size, len(admitted) + 1 + len(self._waiting)))
                self._prefill.add(request)
        return True

    def _run_cycle(self) -> None:
        core = self._core
        try:
            with core.turn():
                began = time.perf_counter()
                self._batch = self._batch or core.make_batch(self._running)
                if seconds := self._batch.step():
                    core.metrics.cycle(self._running, seconds, time.perf_counter() - began)
        except BaseException:
            self._fail(self._running)
            raise

    def _remove_finished(self) -> None:
        if any(r.finish_reason for r in self._running):
            self._close_batch()  # which may finish more of them
            ended = [r for r in self._running if r.finish_reason]
            self._running[:] = [r for r in self._running if not r.finish_reason]
            self._release(ended)

    def _close_batch(self) -> None:
        """Ends the batch before its set of requests changes."""
        batch, self._batch = self._batch, None
        if batch:
            with self._fatal_to(self._running), self._core.turn():
                batch.close()

    @contextmanager
    def _fatal_to(self, members: list[Request]) -> Iterator[None]:
        """Ends the members where the block raises."""
        try:
            yield
        except BaseException:
            self._fail(members)
            raise

    def _fail(self, members: list[Request]) -> None:
        if members is self._running:
            self._batch = None  # without close(): on a device that would commit the cycle under way
        for request in members:
            request.finish_reason = request.finish_reason or "error"
        self._prefill.take_ended()
        self._release(members)

    def _release(self, members: list[Request]) -> None:
        self._core.release(members)
        self._record_end(members, admitted=True)
        members.clear()

    def _record_end(self, requests: Iterable[Request], admitted: bool) -> None:
        for request in requests:
            self._ended.append(request)
            self._core.metrics.ended(request, admitted)
