"""The thread that runs one batch for the requests of many callers; it lives as long as there are any."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specengine.engine.request import Sequence
from specengine.engine.scheduler import Cohort
from specengine.types import StreamEvent

if TYPE_CHECKING:
    from specengine.engine.engine import Engine

logger = logging.getLogger("specengine")
clock = time.monotonic


class Overloaded(RuntimeError):
    """The queue is full: nothing was done for the request, which may be tried again later."""


class Closed(RuntimeError):
    """The engine was closed before the request was done, or before it came."""


class GenerationFailed(RuntimeError):
    """What was done for the request failed, for the reason in __cause__; the engine may serve others."""


@dataclass(eq=False)
class Request:
    """Sequences of one caller, who is told by `tell`, from the worker's thread: the event of every cycle where it is a
    stream, else None when all are done; an exception if that cannot be.

    deadline: seconds from now; the text then ends where it is.  cancelled: may be set by any thread at any moment.
    """

    sequences: list[Sequence]
    tell: Callable[[StreamEvent | Exception | None], object]
    streams: bool = False
    deadline: float | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.due = math.inf if self.deadline is None else clock() + self.deadline

    @property
    def done(self) -> bool:
        """Whether all its sequences have ended, and of a stream the caller was told all of it."""
        return all(s.finish_reason and not (self.streams and s.has_news) for s in self.sequences)


class Worker:
    """Runs requests of any thread in one cohort.  most_waiting: sequences in the queue, at most."""

    def __init__(self, engine: Engine, most_waiting: int) -> None:
        self._engine, self._most_waiting = engine, most_waiting
        self._cohort = self._new_cohort()
        self._lock = threading.Lock()  # of what submit() and stop() change
        self._new: list[Request] = []
        self._requests: dict[int, Request] = {}  # by the identity of each of their sequences
        self._thread: threading.Thread | None = None
        self._closed = self._aborted = False

    def submit(self, request: Request) -> None:
        """Puts a request into the queue. Raises Overloaded or Closed."""
        with self._lock:
            if self._closed:
                raise Closed("the engine is closed")
            waiting = len(self._cohort.waiting) + sum(len(r.sequences) for r in self._new)
            if waiting + len(request.sequences) > self._most_waiting:
                self._engine.metrics.refused(len(request.sequences))
                raise Overloaded(
                    f"the queue has room for {self._most_waiting} sequences, {waiting} are waiting, "
                    f"{len(request.sequences)} more were asked for"
                )
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="specengine")
                thread.start()
                self._thread = thread
            self._new.append(request)

    def stop(self, drain: bool) -> None:
        """Takes no more requests; finishes those there are or, without drain, drops them."""
        with self._lock:
            self._closed, self._aborted = True, self._aborted or not drain
        logger.info("closing: requests are %s", "finished" if drain else "dropped")

    def join(self) -> None:
        """Waits until there are no requests."""
        if thread := self._thread:
            thread.join()

    def _new_cohort(self) -> Cohort:
        # A pass of the target's is the least that those under way can be made to wait for a prompt.
        return Cohort(self._engine, rows=self._engine.model.target.ops.prefill_rows)

    def _work(self) -> None:
        try:
            while self._take():
                try:
                    self._end_early()
                    self._report(self._cohort.step())
                except Exception as error:
                    logger.exception("a pass failed; the requests that it served fail")
                    self._report([s for r in self._requests.values() for s in r.sequences], error)
        except BaseException as error:
            logger.critical("the worker failed, all requests with it", exc_info=True)
            self._fail_all(error)

    def _take(self) -> bool:
        """Takes what is new; whether there is anything to do. If not, the thread ends."""
        with self._lock:
            sequences = [sequence for request in self._new for sequence in request.sequences]
            self._requests |= {id(sequence): request for request in self._new for sequence in request.sequences}
            self._new = []
            if sequences:
                self._cohort.submit(sequences)
            if not self._requests:
                self._thread = None
            return bool(self._requests)

    def _end_early(self) -> None:
        """Ends the requests that were cancelled or are too late, or all of them."""
        now = clock()
        ending = {r for r in self._requests.values() if self._aborted or r.cancelled or r.due <= now}
        for request in ending:
            dropped = self._aborted or request.cancelled
            if dropped:
                self._forget(request, Closed("the engine was closed before the request was done"))
            else:
                logger.info("a request reached its deadline")
            self._cohort.end(request.sequences, "cancelled" if dropped else "deadline")
            self._report(request.sequences)

    def _report(self, sequences: Iterable[Sequence], failure: Exception | None = None) -> None:
        """Tells callers what became of their sequences since they were told last."""
        for sequence in sequences:
            request = self._requests.get(id(sequence))
            if request is None:  # forgotten
                continue
            if sequence.finish_reason == "error":
                self._fail(request, failure)
                continue
            if request.streams and sequence.has_news:
                self._send(request, sequence.take_event(self._engine.rule))
            if sequence.finish_reason and request.done:
                self._forget(request, None)

    def _fail(self, request: Request, failure: BaseException | None) -> None:
        self._forget(request, _failed(failure))
        self._cohort.end(request.sequences, "cancelled")

    def _forget(self, request: Request, last: Exception | None) -> None:
        for sequence in request.sequences:
            self._requests.pop(id(sequence), None)
        if last or not request.streams:
            self._send(request, last)

    def _send(self, request: Request, what: StreamEvent | Exception | None) -> None:
        try:
            request.tell(what)
        except RuntimeError:  # the caller's event loop is gone
            request.cancelled = True

    def _fail_all(self, failure: BaseException) -> None:
        with self._lock:
            requests = {*self._requests.values(), *self._new}
            self._new, self._requests, self._thread = [], {}, None
            self._cohort.close()
            self._cohort = self._new_cohort()
        for request in requests:
            self._send(request, _failed(failure))


def _failed(cause: BaseException | None) -> GenerationFailed:
    # One for each request: callers in other threads add their own tracebacks to it.
    error = GenerationFailed(f"{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
