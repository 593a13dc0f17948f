"""The engine's one loop: requests that share cycles join and leave between two of them, first come, first served."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specengine.engine.batch import Batch
from specengine.engine.device.runner import DeviceBatch
from specengine.engine.request import Request

if TYPE_CHECKING:
    from specengine.engine.engine import Engine


class Scheduler:
    """A part of an engine, run by whoever calls step() until nobody is left; for one thread.

    rows: of prompts that are read between two cycles; those under way wait that long at most. By default all there are.
    What fails ends the requests it was done for (finish_reason `error`) and is raised; the others may go on.
    """

    def __init__(self, engine: Engine, rows: float = math.inf) -> None:
        self._engine, self._rows = engine, rows
        self.waiting: deque[Request] = deque()
        self._reading: list[Request] = []  # whose prompt is being read: one at most
        self._passes: Iterator[int] = iter(())  # of its prompt, that are left
        self._active: list[Request] = []
        self._batch: Batch | DeviceBatch | None = None
        self._gone: list[Request] = []  # since the last step

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._reading or self._active)

    def submit(self, requests: Sequence[Request]) -> None:
        """Puts requests at the end of the queue."""
        self._engine.metrics.submitted(len(requests))
        self.waiting.extend(requests)

    def end(self, requests: Iterable[Request], reason: str) -> None:
        """Ends requests where they are, between two cycles; their pages are free now."""
        for request in requests:
            if not request.finish_reason:
                request.end(reason)
        queue, self.waiting = self.waiting, deque(s for s in self.waiting if not s.finish_reason)
        self._left((s for s in queue if s.finish_reason), began=False)
        if any(s.finish_reason for s in self._reading):
            self._release(self._reading)
        self._part()

    def step(self) -> list[Request]:
        """Takes in who has a place, then one cycle; gives all that were in it, or ended since the last step.

        Where pages are missing that other callers hold, it waits a moment instead.
        """
        self._join()
        if self._active:
            self._cycle()
            self._part()
        elif self.waiting and not self._reading:
            time.sleep(0.001)
        gone, self._gone = self._gone, []
        return gone + self._active

    def close(self) -> None:
        """Lets go of everybody. The garbage collector may do so in the middle of a cycle of this thread, by closing an
        abandoned stream, so it takes neither turn nor lock."""
        self._left(self.waiting, began=False)
        self.waiting.clear()
        self._release(self._reading)
        self._release(self._active)
        self._batch = None

    def _join(self) -> None:
        rows = 0
        while rows < self._rows and (self._reading or self._admit()):
            with self._fatal_to(self._reading):
                read = next(self._passes, None)
            if read is not None:
                rows += read
                continue
            self._disband()
            self._active += self._reading
            self._reading.clear()

    def _admit(self) -> bool:
        engine = self._engine
        if not self.waiting or len(self._active) == engine.max_batch_size:
            return False
        with engine._turn():  # other callers' requests must not take the room that was found
            if not engine._admit(self.waiting[0], self._active):
                return False
            self._reading.append(self.waiting.popleft())
            engine.metrics.joined(self._reading[0])
            with self._fatal_to(self._reading):
                batch = min(engine.max_batch_size, len(self._active) + 1 + len(self.waiting))
                engine._place(self._reading[0], batch)
        self._passes = engine._prefill(self._reading[0])
        return True

    def _cycle(self) -> None:
        with self._fatal_to(self._active), self._engine._turn():
            begin = time.perf_counter()
            self._batch = self._batch or self._engine._batch(self._active)
            if seconds := self._batch.step():
                self._engine.metrics.cycle(self._active, seconds, time.perf_counter() - begin)

    def _part(self) -> None:
        """Those that ended leave."""
        if any(s.finish_reason for s in self._active):
            self._disband()  # which may end more of them
            ended = [s for s in self._active if s.finish_reason]
            self._active[:] = [s for s in self._active if not s.finish_reason]
            self._release(ended)

    def _disband(self) -> None:
        """Ends the batch: its members are about to change."""
        batch, self._batch = self._batch, None
        if batch:
            with self._fatal_to(self._active), self._engine._turn():
                batch.close()

    @contextmanager
    def _fatal_to(self, members: list[Request]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if members is self._active:
                self._batch = None  # not closed: on a device that commits what is under way
            for request in members:
                request.finish_reason = request.finish_reason or "error"
            self._release(members)
            raise

    def _release(self, members: list[Request]) -> None:
        self._engine._release(members)
        self._left(members, began=True)
        members.clear()

    def _left(self, requests: Iterable[Request], began: bool) -> None:
        for request in requests:
            self._gone.append(request)
            self._engine.metrics.left(request, began)
