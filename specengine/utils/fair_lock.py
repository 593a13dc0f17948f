"""A first-come, first-served lock."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, suppress


class _Ticket:
    """The place of a thread in the queue.  called: released once the thread may hold the lock."""

    def __init__(self) -> None:
        self.thread, self.called = threading.get_ident(), threading.Lock()
        self.called.acquire()


class FairLock(AbstractContextManager[None]):
    """A lock that passes to the thread that has waited longest. It cannot be nested.

    threading.Lock is not fair: a thread that releases it between two cycles usually gets it back at once. Another
    caller's stream would then stall until the first caller ends.

    The first ticket of the queue holds the lock, so calling it again does no harm. An interrupt at any bytecode leaves
    at most the lock held by its thread, which gives it back when it enters next.
    """

    def __init__(self) -> None:
        self._queue: deque[_Ticket] = deque()

    @property
    def num_waiting(self) -> int:
        """Threads that wait for it."""
        return max(0, len(self._queue) - 1)

    def __enter__(self) -> None:
        ticket = _Ticket()
        try:
            with suppress(IndexError):
                if self._queue[0].thread == ticket.thread:
                    self._queue.popleft()  # an interrupt ended the last turn of this thread within __exit__
            self._queue.append(ticket)
            self._call_first()
            ticket.called.acquire()
        except BaseException:  # KeyboardInterrupt
            self._leave(ticket)
            raise

    def __exit__(self, *_: object) -> None:
        self._leave(self._queue[0])

    def _leave(self, ticket: _Ticket) -> None:
        try:
            with suppress(ValueError):
                self._queue.remove(ticket)
        finally:
            self._call_first()

    def _call_first(self) -> None:
        with suppress(IndexError, RuntimeError):  # there is none, or it was called before
            self._queue[0].called.release()
