"""What cycles take beyond what is predicted of them: a network's draft drives the target's weights out of the caches,
and what it read has to be kept; neither is seen by the clock of its drafting."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


class Overhead:
    """Seconds of a cycle, of late, of cycles with a network's draft and of those without, for the size of batch of the
    cycle that has begun (by powers of two)."""

    def __init__(self) -> None:
        self._sizes = defaultdict[int, dict[bool, float]](lambda: {False: 0.0, True: 0.0})
        self._seconds = self._sizes[0]
        self._open: tuple[list[weakref.ref], bool, float, float] | None = None

    def __getitem__(self, drafted: bool) -> float:
        return self._seconds[drafted]

    def begin(self, requests: Sequence[Any]) -> float:
        """A cycle begins, and the one before is over if it was these requests'; returns when."""
        now, last, self._open = time.perf_counter(), self._open, None
        self._seconds = self._sizes[len(requests).bit_length()]
        if last is not None and _are(requests, last[0]):
            _, drafted, began, predicted = last
            # no more than double: what waited for somebody else says nothing
            beyond = min(now - began - predicted, predicted)
            self._seconds[drafted] += (beyond - self._seconds[drafted]) / 16
        return now

    def expect(self, requests: Sequence[Any], drafted: bool, began: float, seconds: float) -> None:
        """seconds: predicted of the cycle that has begun, with its drafting."""
        self._open = [weakref.ref(request) for request in requests], drafted, began, seconds


def _are(requests: Sequence[Any], known: Sequence[weakref.ref]) -> bool:
    """Whether they are those, and not others that lie where those were in memory."""
    return len(requests) == len(known) and all(a is b() for a, b in zip(requests, known, strict=True))
