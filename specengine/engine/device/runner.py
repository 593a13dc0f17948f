"""Runs cycles on the device: the host replays a graph and reads the committed tokens one cycle later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from specengine.cache.state_pool import StatePool
from specengine.constraints import Constraint
from specengine.drafters.drafter import Drafter
from specengine.engine.device.buffers import DeviceBuffers
from specengine.engine.device.cycle_graphs import CycleGraphs
from specengine.engine.device.device_batch import DeviceBatch
from specengine.engine.device.slots import DeviceSlots
from specengine.engine.request import Request
from specengine.ops.commit_tokens import record_width
from specengine.rules.base import Wants
from specengine.utils.cuda_graphs import device_turn

RING = 4  # records on the host; at most two cycles are in flight


class DeviceRunner:
    """The device side of an engine: buffers, slots, graphs, the ring of records, and the batch that is loaded."""

    def __init__(
        self,
        buffers: DeviceBuffers,
        graphs: CycleGraphs,
        drafter: Drafter,
        wants: Wants,
        wait_for: Callable[[torch.cuda.Event], None],
        states: StatePool | None = None,
    ) -> None:
        """wait_for: waits for an event of the device, as target.graphs does."""
        self.buffers, self.graphs, self.drafter, self.wants = buffers, graphs, drafter, wants
        self.slots = DeviceSlots(buffers, drafter, states)
        self.loaded: DeviceBatch | None = None
        largest = max(size * record_width(nodes) for size, nodes in graphs.batches)
        pinned = buffers.device.type == "cuda"
        self._ring = [torch.zeros(largest, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._written = [torch.cuda.Event() if pinned else None for _ in range(RING)]
        self._wait_for, self._launched = wait_for, 0

    def batch(self, requests: Sequence[Request]) -> DeviceBatch:
        """Makes a batch, which is loaded at its first step."""
        return DeviceBatch(requests, self)

    @contextmanager
    def timed(self) -> Iterator[list[dict[str, float]]]:
        """Makes cycles wait for each other, and yields the list of the seconds by phase of each."""
        with device_turn(self.buffers.device):
            if self.loaded:
                self.loaded.leave()
            self.slots.place([], 0)  # captures run cycles, which must touch no request's cache
        graphs, self.graphs = self.graphs, self.graphs.clocked()
        try:
            yield self.graphs.timings
        finally:
            self.graphs = graphs

    def launch(
        self, size: int, nodes: int, constraints: Sequence[Constraint | None] = ()
    ) -> Callable[[], list[list[int]]]:
        """Starts a cycle; the returned call waits for it and gives one record per slot.

        constraints: of the slots, where any of them is constrained.
        """
        batch = self.graphs.run(size, nodes, constraints)
        turn = self._launched % RING
        self._launched += 1
        record, event = self._ring[turn][: batch.record.numel()].view(batch.record.shape), self._written[turn]
        record.copy_(batch.record, non_blocking=True)
        if event:
            event.record()

        def read() -> list[list[int]]:
            if event:
                self._wait_for(event)
            return record.tolist()

        return read
