"""One captured cycle per (batch bucket, tree width), all captured at start, and the choice among the widths."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specengine.constraints import Constraint
from specengine.draft_policy.widths import WidthPolicy
from specengine.engine.cycle import Cycle
from specengine.engine.device.buffers import DeviceBuffers
from specengine.engine.device.graph_batch import GraphBatch
from specengine.ops.row_tools import take_rows
from specengine.utils.cuda_graphs import Graph, device_turn
from specengine.utils.timers import DeviceClock, HostClock

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_ROWS = 512  # of one pass: a wider tree for every request of a batch costs more than it saves


def widths_up_to(nodes: int) -> tuple[int, ...]:
    """Returns the widths captured for trees of at most `nodes` nodes."""
    return (*(width for width in WIDTHS if width < nodes), nodes)


def buckets_up_to(size: int) -> tuple[int, ...]:
    """Returns the batch sizes captured for at most `size` requests."""
    return (*(width for width in WIDTHS if width < size), size)


@dataclass(frozen=True)
class GraphOptions:
    """nodes: of the largest tree.  capture: as CUDA graphs; else, and always on the simulator, as plain calls.

    adaptive: choose() follows measured times and acceptance; else it takes the largest width.
    fixed: only the largest width exists.  clocked: every cycle is waited for, and its phases are timed.
    """

    nodes: int
    capture: bool
    adaptive: bool
    fixed: bool = False
    clocked: bool = False


def captured_widths(size: int, options: GraphOptions) -> dict[int, list[int]]:
    """Returns the widths that are captured for each bucket of at most `size` requests."""
    fitting = {b: [w for w in widths_up_to(options.nodes) if w == 1 or b * w <= MAX_ROWS] for b in buckets_up_to(size)}
    return {b: widths[-1:] for b, widths in fitting.items()} if options.fixed else fitting


class CycleGraphs:
    """Runs a cycle for every bucket and width.

    batches: one per (bucket, width). A batch with a constrained request has another one, whose cycles run as plain
    calls: the masks depend on the drafted trees, and the host fills them within the cycle.
    timings: seconds by phase of every cycle, where options.clocked.
    """

    def __init__(self, buffers: DeviceBuffers, cycle: Cycle, options: GraphOptions) -> None:
        self._buffers, self._cycle, self._options = buffers, cycle, options
        self.timings: list[dict[str, float]] = []
        self._widths = captured_widths(buffers.size, options)
        self.buckets = tuple(self._widths)
        with device_turn(buffers.device):
            self.batches = {
                (b, w): GraphBatch(buffers, b, w, wants=cycle.rule.wants)
                for b, fitting in self._widths.items()
                for w in fitting
            }
        self._masked: dict[tuple[int, int], GraphBatch] = {}
        self._choice = WidthPolicy(options.nodes)
        self._device_graphs = cycle.target.graphs
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._seconds: dict[tuple[int, int], float] = {}
        if options.capture:
            self._capture_all()

    def clocked(self) -> CycleGraphs:
        """Makes the same cycles with clocks in them, which cost a little time of their own."""
        other = CycleGraphs(self._buffers, self._cycle, replace(self._options, clocked=True))
        other._choice, other._seconds = self._choice, self._seconds
        return other

    def run(self, size: int, nodes: int, constraints: Sequence[Constraint | None] = ()) -> GraphBatch:
        """Runs one cycle of the loaded requests and returns its batch.

        constraints: of the slots, where any of them is constrained.
        """
        key, masked = (self.bucket(size), nodes), any(each is not None for each in constraints)
        batch = self.of(size, nodes, masked)
        batch.constraints = constraints
        if batch.drafter_state is not None:
            self._cycle.drafter.before_cycle(batch)
        if key in self._graphs and not masked:
            self._graphs[key].replay()
        else:
            self._run_cycle(batch)
        if batch.clock:
            if self._options.capture:
                torch.cuda.synchronize(self._buffers.device)
            self.timings.append(batch.clock.seconds)
        return batch

    def of(self, size: int, nodes: int, masked: bool = False) -> GraphBatch:
        """Returns the batch that run(size, nodes) works on.  masked: whether any request is constrained."""
        key = (self.bucket(size), nodes)
        if not masked:
            return self.batches[key]
        if key not in self._masked:
            self._masked[key] = GraphBatch(self._buffers, *key, masked=True, wants=self._cycle.rule.wants)
        return self._masked[key]

    def logits(self, batch: GraphBatch, rows: Sequence[int]) -> torch.Tensor:
        """Computes the logits of some rows of a batch's last cycle again: cycles keep hidden states alone."""
        return self._cycle.target.logits(take_rows(batch.hidden_states.normed, rows))

    def width_for(self, size: int, nodes: int) -> int:
        """Returns the narrowest captured width that holds `nodes` nodes, or the widest of all."""
        widths = self._widths[self.bucket(size)]
        return widths[min(bisect_left(widths, nodes), len(widths) - 1)]

    def choose(self, size: int) -> int:
        """Returns the width with the least expected time per token."""
        bucket = self.bucket(size)
        widths = self._widths[bucket]
        if not (self._options.adaptive and self._options.capture):
            return widths[-1]
        return self._choice.choose(widths, [self._seconds[bucket, width] for width in widths])

    def observe(self, nodes: int, levels: int, accepted: int) -> None:
        """Learns from a cycle of width `nodes`. levels: of the tree.  accepted: drafted tokens."""
        self._choice.observe(nodes, levels, accepted)

    def bucket(self, size: int) -> int:
        """Returns how many slots a cycle of `size` requests has."""
        return self.buckets[bisect_left(self.buckets, size)]

    def _run_cycle(self, batch: GraphBatch) -> None:
        if self._options.clocked:
            batch.clock = DeviceClock() if self._options.capture else HostClock()
        self._cycle.run(batch)

    def _capture_all(self) -> None:
        """Captures and times every cycle with idle slots, which touch nothing; other engines run in between."""
        device = self._buffers.device
        pool = torch.cuda.graph_pool_handle()
        largest_first = sorted(self.batches, key=lambda key: -key[0] * key[1])  # the others reuse its memory
        with device_turn(device):
            if torch.cuda.get_device_capability(device) >= (9, 0):
                self._device_graphs.overlap_launches(self._overlap_pays(largest_first[-1]))
        for key in largest_first:
            with device_turn(device):
                self._graphs[key] = self._capture(key, pool)
        for key, graph in self._graphs.items():
            with device_turn(device):
                self._seconds[key] = _least_seconds(graph.replay, device)

    def _capture(self, key: tuple[int, int], pool: _POOL_HANDLE | None = None) -> Graph:
        return self._device_graphs.capture(lambda: self._run_cycle(self.batches[key]), pool)

    def _overlap_pays(self, key: tuple[int, int]) -> bool:
        """Returns whether a cycle is faster when its kernels start before their predecessors end.

        The graphs are dropped, so each has a pool of its own: the batch holds outputs in it until its last capture.
        """
        seconds = []
        for enabled in (False, True):
            self._device_graphs.overlap_launches(enabled)
            seconds.append(_least_seconds(self._capture(key).replay, self._buffers.device, repeats=20))
        return seconds[1] < seconds[0]


def _least_seconds(run: Callable[[], None], device: torch.device, repeats: int = 5) -> float:
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
