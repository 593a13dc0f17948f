"""Callers take turns in the order they came."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A lock that is handed to the longest waiting thread.

    threading.Lock is not fair: a thread that releases it between two cycles mostly gets it back at once, and another
    caller's stream would stand still until the first one is done.
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
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # released by the thread that hands over
        except BaseException:  # a KeyboardInterrupt while waiting: give the place up, or pass the turn on
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False
