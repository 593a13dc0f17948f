"""Signals that end a run after its step instead of within it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Tells whether SIGINT or SIGTERM has come since; a second one acts as it always does.

    Python delivers signals to the main thread only; elsewhere nothing changes.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return

    def remember(number: int, _: object) -> None:
        came.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
