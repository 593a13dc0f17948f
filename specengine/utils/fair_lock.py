"""A first-come, first-served lock."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager


class FairLock(AbstractContextManager[None]):
    """A lock that passes to the thread that has waited longest.

    threading.Lock is not fair: a thread that releases it between two cycles usually gets it back at once. Another
    caller's stream would then stall until the first caller ends.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        try:
            ticket.acquire()  # __exit__ of the current holder releases it
        except BaseException:  # KeyboardInterrupt: leave the queue, or pass the lock on
            with self._guard:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                    raise
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False
