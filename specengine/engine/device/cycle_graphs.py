"""One captured cycle per (batch bucket, tree width), all captured at start, and the choice among the widths."""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections.abc import Callable

import torch

from specengine import _C
from specengine.draft_policy.width_choice import WidthChoice
from specengine.engine.device.buffers import DeviceBuffers, GraphBatch
from specengine.utils.cuda_graphs import capture_graph
from specengine.utils.timers import DeviceClock, HostClock

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_ROWS = 512  # of one pass: beyond this a wide tree of every request of a batch would not pay anyway


def widths_up_to(nodes: int) -> tuple[int, ...]:
    """The widths captured for trees of at most `nodes` nodes."""
    return (*(width for width in WIDTHS if width < nodes), nodes)


def buckets_up_to(size: int) -> tuple[int, ...]:
    """The batch sizes captured for at most `size` requests."""
    return (*(width for width in WIDTHS if width < size), size)


class CycleGraphs:
    """cycle(slots) for every bucket and width, as a CUDA graph or, with capture=False, as plain calls.

    On a machine without CUDA (the simulator) only plain calls are possible. adaptive: choose(size) picks the width that
    pays by measured times and the acceptance seen; else always the largest. fixed: no other is ever needed. clocked:
    every cycle is waited for and leaves in `timings` the seconds its phases took.
    """

    def __init__(
        self,
        state: DeviceBuffers,
        cycle: Callable[[GraphBatch], None],
        nodes: int,
        *,
        capture: bool,
        adaptive: bool,
        fixed: bool = False,
        clocked: bool = False,
    ) -> None:
        self._state, self._nodes = state, nodes
        self._cycle = weakref.WeakMethod(cycle)  # of the engine that owns this: memory must not wait for the collector
        self._captures, self._adaptive, self._fixed, self._clocked = capture, adaptive and capture, fixed, clocked
        self.timings: list[dict[str, float]] = []
        self.buckets, widths = buckets_up_to(state.size), widths_up_to(nodes)
        self._widths = {b: [w for w in widths if w == 1 or b * w <= MAX_ROWS] for b in self.buckets}
        if fixed:
            self._widths = {b: fitting[-1:] for b, fitting in self._widths.items()}
        self.slots = {(b, w): GraphBatch(state, b, w) for b, fitting in self._widths.items() for w in fitting}
        self._choice = WidthChoice(nodes)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._seconds: dict[tuple[int, int], float] = {}
        if capture:
            self._capture(state)

    def clocked(self) -> CycleGraphs:
        """The same cycles with clocks in them, which cost a little time of their own."""
        options = {"capture": self._captures, "adaptive": self._adaptive, "fixed": self._fixed}
        other = CycleGraphs(self._state, self._live_cycle(), self._nodes, **options, clocked=True)
        other._choice, other._seconds = self._choice, self._seconds
        return other

    def run(self, size: int, nodes: int) -> GraphBatch:
        """One cycle of the loaded requests."""
        key = (self._bucket(size), nodes)
        slots = self.slots[key]
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            self._cycle_of(slots)
        if slots.clock:
            if self._captures:
                torch.cuda.synchronize(self._state.device)
            self.timings.append(slots.clock.seconds)
        return slots

    def _cycle_of(self, slots: GraphBatch) -> None:
        if self._clocked:
            slots.clock = DeviceClock() if self._captures else HostClock()
        self._live_cycle()(slots)

    def _live_cycle(self) -> Callable[[GraphBatch], None]:
        cycle = self._cycle()
        if cycle is None:
            raise RuntimeError("the engine of these cycles is gone")
        return cycle

    def of(self, size: int, nodes: int) -> GraphBatch:
        """The slots that run(size, nodes) works on."""
        return self.slots[self._bucket(size), nodes]

    def width_for(self, size: int, nodes: int) -> int:
        """The narrowest captured width that holds `nodes` nodes, or the widest there is."""
        widths = self._widths[self._bucket(size)]
        return widths[min(bisect_left(widths, nodes), len(widths) - 1)]

    def choose(self, size: int) -> int:
        """The width with the least expected time per token."""
        bucket = self._bucket(size)
        widths = self._widths[bucket]
        if not self._adaptive:
            return widths[-1]
        return self._choice.choose(widths, [self._seconds[bucket, width] for width in widths])

    def observe(self, nodes: int, drafted: int, accepted: int) -> None:
        """Learns from a cycle of width `nodes` whose tree was `drafted` deep."""
        self._choice.observe(nodes, drafted, accepted)

    def _bucket(self, size: int) -> int:
        return self.buckets[bisect_left(self.buckets, size)]

    def _capture(self, state: DeviceBuffers) -> None:
        """Captures and times every cycle with idle slots, which touch nothing."""
        state.load([])
        self._pool = torch.cuda.graph_pool_handle()
        largest_first = sorted(self.slots, key=lambda key: -key[0] * key[1])  # the others reuse its memory
        if torch.cuda.get_device_capability(state.device) >= (9, 0):
            _C.set_programmatic_launch(self._overlap_pays(largest_first[-1], state.device))
        for key in largest_first:
            self._graphs[key] = self._captured(self.slots[key], state.device)
        for key, graph in self._graphs.items():
            self._seconds[key] = _seconds(graph.replay, state.device)

    def _captured(self, slots: GraphBatch, device: torch.device) -> torch.cuda.CUDAGraph:
        return capture_graph(lambda: self._cycle_of(slots), device, pool=self._pool)

    def _overlap_pays(self, key: tuple[int, int], device: torch.device) -> bool:
        """Whether a cycle is faster when its kernels start before their predecessors end."""
        seconds = []
        for enabled in (False, True):
            _C.set_programmatic_launch(enabled)
            graph = self._captured(self.slots[key], device)
            seconds.append(_seconds(graph.replay, device, repeats=20))
        return seconds[1] < seconds[0]


def _seconds(run: Callable[[], None], device: torch.device, repeats: int = 5) -> float:
    """The least time of a few runs."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)
