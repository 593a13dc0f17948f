"""The thread that runs one batch for the groups of many callers; it lives as long as there are any."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specengine.engine.request import Request
from specengine.engine.scheduler import Scheduler
from specengine.types import StreamEvent

if TYPE_CHECKING:
    from specengine.engine.engine import Engine

logger = logging.getLogger("specengine")
clock = time.monotonic


class Overloaded(RuntimeError):
    """The queue is full: nothing was done for the group, which may be tried again later."""


class Closed(RuntimeError):
    """The engine was closed before the group was done, or before it came."""


class GenerationFailed(RuntimeError):
    """What was done for the group failed, for the reason in __cause__; the engine may serve others."""


@dataclass(eq=False)
class RequestGroup:
    """Requests of one caller, who is told by `tell`, from the worker's thread: the event of every cycle where it is a
    stream, else None when all are done; an exception if that cannot be.

    deadline: seconds from now; the text then ends where it is.  cancelled: may be set by any thread at any moment.
    """

    requests: list[Request]
    tell: Callable[[StreamEvent | Exception | None], object]
    streams: bool = False
    deadline: float | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.due = math.inf if self.deadline is None else clock() + self.deadline

    @property
    def done(self) -> bool:
        """Whether all its requests have ended, and of a stream the caller was told all of it."""
        return all(s.finish_reason and not (self.streams and s.has_news) for s in self.requests)


class Worker:
    """Runs groups of any thread in one cohort.  most_waiting: requests in the queue, at most."""

    def __init__(self, engine: Engine, most_waiting: int) -> None:
        self._engine, self._most_waiting = engine, most_waiting
        self._cohort = self._new_cohort()
        self._lock = threading.Lock()  # of what submit() and stop() change
        self._new: list[RequestGroup] = []
        self._groups: dict[int, RequestGroup] = {}  # by the identity of each of their requests
        self._thread: threading.Thread | None = None
        self._closed = self._aborted = False

    def submit(self, group: RequestGroup) -> None:
        """Puts a group into the queue. Raises Overloaded or Closed."""
        with self._lock:
            if self._closed:
                raise Closed("the engine is closed")
            waiting = len(self._cohort.waiting) + sum(len(r.requests) for r in self._new)
            if waiting + len(group.requests) > self._most_waiting:
                self._engine.metrics.refused(len(group.requests))
                raise Overloaded(
                    f"the queue has room for {self._most_waiting} requests, {waiting} are waiting, "
                    f"{len(group.requests)} more were asked for"
                )
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="specengine")
                thread.start()
                self._thread = thread
            self._new.append(group)

    def stop(self, drain: bool) -> None:
        """Takes no more groups; finishes those there are or, without drain, drops them."""
        with self._lock:
            self._closed, self._aborted = True, self._aborted or not drain
        logger.info("closing: groups are %s", "finished" if drain else "dropped")

    def join(self) -> None:
        """Waits until there are no groups."""
        if thread := self._thread:
            thread.join()

    def _new_cohort(self) -> Scheduler:
        # A pass of the target's is the least that those under way can be made to wait for a prompt.
        return Scheduler(self._engine, rows=self._engine.model.target.ops.prefill_rows)

    def _work(self) -> None:
        try:
            while self._take():
                try:
                    self._end_early()
                    self._report(self._cohort.step())
                except Exception as error:
                    logger.exception("a pass failed; the groups that it served fail")
                    self._report([s for r in self._groups.values() for s in r.requests], error)
        except BaseException as error:
            logger.critical("the worker failed, all groups with it", exc_info=True)
            self._fail_all(error)

    def _take(self) -> bool:
        """Takes what is new; whether there is anything to do. If not, the thread ends."""
        with self._lock:
            requests = [request for group in self._new for request in group.requests]
            self._groups |= {id(request): group for group in self._new for request in group.requests}
            self._new = []
            if requests:
                self._cohort.submit(requests)
            if not self._groups:
                self._thread = None
            return bool(self._groups)

    def _end_early(self) -> None:
        """Ends the groups that were cancelled or are too late, or all of them."""
        now = clock()
        ending = {r for r in self._groups.values() if self._aborted or r.cancelled or r.due <= now}
        for group in ending:
            dropped = self._aborted or group.cancelled
            if dropped:
                self._forget(group, Closed("the engine was closed before the group was done"))
            else:
                logger.info("a group reached its deadline")
            self._cohort.end(group.requests, "cancelled" if dropped else "deadline")
            self._report(group.requests)

    def _report(self, requests: Iterable[Request], failure: Exception | None = None) -> None:
        """Tells callers what became of their requests since they were told last."""
        for request in requests:
            group = self._groups.get(id(request))
            if group is None:  # forgotten
                continue
            if request.finish_reason == "error":
                self._fail(group, failure)
                continue
            if group.streams and request.has_news:
                self._send(group, request.take_event(self._engine.rule))
            if request.finish_reason and group.done:
                self._forget(group, None)

    def _fail(self, group: RequestGroup, failure: BaseException | None) -> None:
        self._forget(group, _failed(failure))
        self._cohort.end(group.requests, "cancelled")

    def _forget(self, group: RequestGroup, last: Exception | None) -> None:
        for request in group.requests:
            self._groups.pop(id(request), None)
        if last or not group.streams:
            self._send(group, last)

    def _send(self, group: RequestGroup, what: StreamEvent | Exception | None) -> None:
        try:
            group.tell(what)
        except RuntimeError:  # the caller's event loop is gone
            group.cancelled = True

    def _fail_all(self, failure: BaseException) -> None:
        with self._lock:
            groups = {*self._groups.values(), *self._new}
            self._new, self._groups, self._thread = [], {}, None
            self._cohort.close()
            self._cohort = self._new_cohort()
        for group in groups:
            self._send(group, _failed(failure))


def _failed(cause: BaseException | None) -> GenerationFailed:
    # One for each group: callers in other threads add their own tracebacks to it.
    error = GenerationFailed(f"{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
