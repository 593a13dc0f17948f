"""Keeps the exceptions of signal handlers, such as KeyboardInterrupt, out of a section of the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)]
Handler = Callable[[int, FrameType | None], object]


class DeferredSignals(AbstractContextManager["DeferredSignals"]):
    """Runs the Python handlers of SIGNALS at the end of the context, and at allowed(), instead of at any bytecode.

    An exception between two bytecodes would leave a lock held, a page without owner or a counter wrong. Only the main
    thread runs handlers, so other threads need nothing. Contexts may be nested.
    """

    def __init__(self) -> None:
        self._holding = False
        self._handlers: dict[int, Handler] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    @property
    def pending(self) -> bool:
        """Whether a handler waits for its run."""
        return bool(self._arrived)

    def __enter__(self) -> DeferredSignals:
        self._hold()
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Runs the handlers that wait, and lets handlers run until its context ends."""
        try:
            self._release()
            yield
        finally:
            self._hold()

    def _hold(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._holding = True
        try:
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._note:
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # of a handler that was still in its place
            self._release()
            raise

    def _release(self) -> None:
        # From here on _note() passes signals on, so an exception below loses none.
        self._holding = False
        try:
            if threading.current_thread() is threading.main_thread():
                for number, handler in self._handlers.items():
                    if signal.getsignal(number) == self._note:
                        signal.signal(number, handler)
        except BaseException:  # of one handler, before the others are in their places again
            self._release()
            raise
        while self._arrived:
            number, frame = self._arrived.pop(0)
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._arrived.append((number, frame))
        else:
            self._handlers[number](number, frame)
