"""How calls are timed: by the host's clock, or on a GPU as a graph between two events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from specengine.utils.cuda_graphs import capture_graph

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], Callable[[], float]]  # from calls to what times them: mean seconds of one


class HostTimer:
    """Runs calls one after the other; those that set something up have done so before the first measurement."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        calls[0]()

    def __call__(self) -> float:
        begin = time.perf_counter()
        for call in self._calls:
            call()
        return (time.perf_counter() - begin) / len(self._calls)


class GraphTimer:
    """Captures calls as one CUDA graph, which keeps the host out of their time. They must be capturable."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._count = len(calls)
        device = torch.device("cuda", torch.cuda.current_device())
        self._graph = capture_graph(lambda: [call() for call in calls], device, warm_up=calls[0])
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        self._graph.replay()  # while it runs the host gets ahead, so that the next one follows without a gap
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3 / self._count


def timer_for(device: torch.device) -> Timer:
    return GraphTimer if device.type == "cuda" else HostTimer


def medians(timers: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median of each timer; they take turns, so that a slow spell falls on all of them."""
    seconds: list[list[float]] = [[] for _ in timers]
    for turn in range(rounds + 1):
        for step in range(len(timers)):
            position = (turn + step) % len(timers)
            spent = timers[position]()
            if turn:  # the first is a warm-up
                seconds[position].append(spent)
    return [median(spent) for spent in seconds]
