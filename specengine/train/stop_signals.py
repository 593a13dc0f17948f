"""Lets SIGINT and SIGTERM end a run after its step instead of within it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT or SIGTERM has arrived; a second signal has its usual effect.

    Python delivers signals to the main thread only; in other threads nothing changes.
    """
    arrived = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield arrived.is_set
        return

    def remember(number: int, _: object) -> None:
        arrived.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield arrived.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
