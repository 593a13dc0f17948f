"""Timers of calls: by the clock of the host, and on a GPU by two events around a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from specengine.utils.cuda_graphs import capture_graph

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], Callable[[], float]]  # makes a function that returns mean seconds of a call


class HostTimer:
    """Times calls one after the other. The first call runs once before, because it may allocate."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        calls[0]()

    def __call__(self) -> float:
        begin = time.perf_counter()
        for call in self._calls:
            call()
        return (time.perf_counter() - begin) / len(self._calls)


class GraphTimer:
    """Captures calls as one CUDA graph, so that the time of the host does not count."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._count = len(calls)
        device = torch.device("cuda", torch.cuda.current_device())
        self._graph = capture_graph(lambda: [call() for call in calls], device, warm_up=calls[0])
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        self._graph.replay()  # the host queues the next replay meanwhile, so that no gap is timed
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3 / self._count


def timer_for(device: torch.device) -> Timer:
    """Returns the kind of timer for a device."""
    return GraphTimer if device.type == "cuda" else HostTimer


def medians(timers: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Returns the median of each timer. Timers take turns, so that a slow spell of the machine affects all of them."""
    seconds: list[list[float]] = [[] for _ in timers]
    for turn in range(rounds + 1):
        for step in range(len(timers)):
            position = (turn + step) % len(timers)
            spent = timers[position]()
            if turn:  # the first is a warm-up
                seconds[position].append(spent)
    return [median(spent) for spent in seconds]
