"""The thread that runs one scheduler for the calls of many threads and tasks; it ends when there are no requests."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specengine.engine.core import EngineCore
from specengine.engine.request import Request
from specengine.engine.scheduler import Scheduler
from specengine.types import Closed, ConstraintFailed, GenerationFailed, Overloaded, StreamEvent
from specengine.utils.interrupts import DeferredSignals

logger = logging.getLogger("specengine")
clock = time.monotonic


@dataclass(eq=False)
class Submission:
    """The requests of one call, and how its caller hears of them.

    notify: called from the loop's thread. It gets every event of a stream, else None once at the end. It gets an
      exception where the requests fail.
    deadline: seconds from now; the texts then end where they are.  cancelled: any thread may set it at any moment.
    """

    requests: Sequence[Request]
    notify: Callable[[StreamEvent | Exception | None], object]
    streams: bool = False
    deadline: float | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.due = math.inf if self.deadline is None else clock() + self.deadline

    @property
    def complete(self) -> bool:
        """Whether all requests have ended, and their events have been delivered."""
        return all(r.finish_reason and not (self.streams and r.has_event) for r in self.requests)


class BackgroundLoop:
    """Steps a scheduler while there are requests.

    max_waiting: requests in the queue, at most, beside those for which the batch has a place.
    """

    def __init__(self, core: EngineCore, max_waiting: int) -> None:
        self._core, self._max_waiting = core, max_waiting
        self._scheduler = self._new_scheduler()
        self._lock = threading.Lock()  # guards what submit() and stop() change
        self._new: list[Submission] = []
        self._submissions: dict[int, Submission] = {}  # by the identity of each of their requests
        self._thread: threading.Thread | None = None
        self._closed = False
        self._aborted = False

    @property
    def thread(self) -> threading.Thread | None:
        """The loop's thread; None while there are no requests."""
        return self._thread

    def submit(self, submission: Submission) -> None:
        """Puts requests into the queue. Raises Overloaded or Closed."""
        count = len(submission.requests)
        with DeferredSignals(), self._lock:
            if self._closed:
                raise Closed("the engine is closed")
            places = self._core.max_batch_size - self._scheduler.num_admitted
            waiting = self._scheduler.num_waiting + sum(len(new.requests) for new in self._new) - places
            if waiting + count > self._max_waiting:
                self._core.metrics.refused(count)
                raise Overloaded(
                    f"the queue has room for {self._max_waiting} requests: {max(0, waiting)} are waiting, "
                    f"{count} more came"
                )
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="specengine")
                thread.start()
                self._thread = thread
            self._new.append(submission)

    def stop(self, drain: bool) -> None:
        """Refuses further requests; finishes the present ones, or drops them where drain is false."""
        with DeferredSignals(), self._lock:
            self._closed = True
            self._aborted = self._aborted or not drain
        logger.info("closing: requests are %s", "finished" if drain else "dropped")

    def join(self) -> None:
        """Waits until there are no requests."""
        if thread := self._thread:
            thread.join()

    def _new_scheduler(self) -> Scheduler:
        # One pass of the target is the shortest pause that a prompt can make for running requests.
        return Scheduler(self._core, max_prefill_rows=self._core.target.ops.prefill_rows)

    def _run(self) -> None:
        try:
            while self._take_new():
                try:
                    self._end_early()
                    self._report(self._scheduler.step())
                except Exception as error:
                    logger.exception("a step failed; its requests fail with it")
                    self._report([r for each in self._submissions.values() for r in each.requests], error)
        except BaseException as error:
            logger.critical("the loop failed, and all requests with it", exc_info=True)
            self._fail_all(error)

    def _take_new(self) -> bool:
        """Hands new requests to the scheduler; returns whether there are any requests. If not, the thread ends."""
        with self._lock:
            requests = [request for new in self._new for request in new.requests]
            self._submissions |= {id(request): new for new in self._new for request in new.requests}
            self._new = []
            if requests:
                self._scheduler.add(requests)
            if not self._submissions:
                self._thread = None
            return bool(self._submissions)

    def _end_early(self) -> None:
        """Ends cancelled requests and those past their deadline; all of them after stop(drain=False)."""
        now = clock()
        every = set(self._submissions.values())
        for submission in [s for s in every if self._aborted or s.cancelled or s.due <= now]:
            dropped = self._aborted or submission.cancelled
            if dropped:  # a cancelled caller no longer listens; callers of an aborted engine get this message
                self._forget(submission, Closed("the engine was closed before the request was done"))
            else:
                logger.info("a request reached its deadline")
            self._scheduler.finish(submission.requests, "cancelled" if dropped else "deadline")
            self._report(submission.requests)

    def _report(self, requests: Iterable[Request], failure: Exception | None = None) -> None:
        """Delivers the news of requests to their callers."""
        for request in requests:
            submission = self._submissions.get(id(request))
            if submission is None:  # its caller has its last news
                continue
            if request.finish_reason == "error":
                self._fail(submission, failure or request.failure)
                continue
            if submission.streams and request.has_event:
                self._notify(submission, request.take_event(self._core.rule))
            if request.finish_reason and submission.complete:
                self._forget(submission, None)

    def _fail(self, submission: Submission, failure: BaseException | None) -> None:
        self._forget(submission, _failed(failure))
        self._scheduler.finish(submission.requests, "cancelled")

    def _forget(self, submission: Submission, last: Exception | None) -> None:
        for request in submission.requests:
            self._submissions.pop(id(request), None)
        if last or not submission.streams:
            self._notify(submission, last)

    def _notify(self, submission: Submission, news: StreamEvent | Exception | None) -> None:
        try:
            submission.notify(news)
        except RuntimeError:  # the caller's event loop is closed
            submission.cancelled = True

    def _fail_all(self, failure: BaseException) -> None:
        with self._lock:
            submissions = {*self._submissions.values(), *self._new}
            self._new, self._submissions, self._thread = [], {}, None
            self._scheduler.close()
            self._scheduler = self._new_scheduler()
        for submission in submissions:
            self._notify(submission, _failed(failure))


def _failed(cause: BaseException | None) -> GenerationFailed:
    # One for each caller: other threads add their own tracebacks to it.
    text = str(cause) if isinstance(cause, GenerationFailed) else f"{type(cause).__name__}: {cause}"
    error = ConstraintFailed(text) if isinstance(cause, ConstraintFailed) else GenerationFailed(text)
    error.__cause__ = cause
    return error
