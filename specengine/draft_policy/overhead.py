"""What cycles take beyond their predicted time.

A network's draft evicts the target's weights from the caches, and its hidden states must be kept. The clock of its
drafting measures neither.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


class Overhead:
    """Averages the unpredicted seconds of recent cycles, apart for cycles with and without a network's draft.

    Batch sizes are told apart by powers of two; indexing reads the averages of the cycle that has begun.
    """

    def __init__(self) -> None:
        self._sizes = defaultdict[int, dict[bool, float]](lambda: {False: 0.0, True: 0.0})
        self._seconds = self._sizes[0]
        self._open: tuple[list[weakref.ref], bool, float, float] | None = None

    def __getitem__(self, drafted: bool) -> float:
        return self._seconds[drafted]

    def begin(self, requests: Sequence[Any]) -> float:
        """Begins a cycle and closes the previous one if it had the same requests; returns the time."""
        now = time.perf_counter()
        last, self._open = self._open, None
        self._seconds = self._sizes[len(requests).bit_length()]
        if last is not None and _are(requests, last[0]):
            _, drafted, began, predicted = last
            # At most double: a cycle that waited for another caller measures nothing.
            beyond = min(now - began - predicted, predicted)
            self._seconds[drafted] += (beyond - self._seconds[drafted]) / 16
        return now

    def expect(self, requests: Sequence[Any], drafted: bool, began: float, seconds: float) -> None:
        """Notes the prediction for the cycle that has begun; seconds: with its drafting."""
        self._open = [weakref.ref(request) for request in requests], drafted, began, seconds


def _are(requests: Sequence[Any], known: Sequence[weakref.ref]) -> bool:
    """Returns whether the requests are the known objects, and not new ones at the same addresses."""
    return len(requests) == len(known) and all(a is b() for a, b in zip(requests, known, strict=True))
