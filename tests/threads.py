"""Work of several threads at once, for tests of what they share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

CALLERS = 4
Result = TypeVar("Result")


def at_once(work: Callable[[int], Result], callers: int = CALLERS) -> list[Result]:
    """Results of work(0), work(1), ..., begun together in threads of their own; raises what one of them raises."""
    begin, interval = Barrier(callers), sys.getswitchinterval()

    def run(caller: int) -> Result:
        begin.wait()
        return work(caller)

    # The next thread takes the GIL while an op runs without it; at the usual 5 ms a short op has it back before.
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(callers) as threads:
            return list(threads.map(run, range(callers)))
    finally:
        sys.setswitchinterval(interval)
