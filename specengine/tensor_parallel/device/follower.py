"""What a rank from 1 on does with the passes and graphs of several devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from specengine.models.rope import RopeTables
from specengine.ops.decoder import Pass
from specengine.ops.prefill.chains import PromptChains
from specengine.tensor_parallel.device.collectives import Collectives
from specengine.tensor_parallel.device.messages import (
    BeginCapture,
    Connect,
    DeviceCompact,
    DeviceForward,
    DropGraphs,
    EndCapture,
    OverlapLaunches,
    Replay,
)
from specengine.tensor_parallel.device.packed_rows import PackedRows, packed_size
from specengine.tensor_parallel.host_follower import Handlers
from specengine.tensor_parallel.messages import DropCaches
from specengine.tensor_parallel.rank_cache import RankCache
from specengine.utils.cuda_graphs import DeviceGraphs, Graph, capture_graph


class DeviceFollower:
    """Follows passes of several devices.

    place: rank, number of ranks, device.  hidden: columns of a row.  receive: waits for the next message.
    handle: does a message of any kind.  caches: by number.
    """

    decoder: Pass

    def __init__(
        self,
        place: tuple[int, int, torch.device],
        hidden: int,
        receive: Callable[[], object],
        handle: Callable[[object], None],
        rope: RopeTables,
        caches: Mapping[int, RankCache],
    ) -> None:
        self._place, self._device, self._hidden = place, place[2], hidden
        self._receive, self._handle, self._rope, self._caches = receive, handle, rope, caches
        self._collectives: Collectives | None = None
        self._graphs: dict[int, Graph] = {}
        self._pools: dict[Hashable, Any] = {}
        self._last: PackedRows | None = None  # of the last pass

    @property
    def handlers(self) -> Handlers:
        return {
            Connect: self._connect,
            DeviceForward: self._forward,
            DeviceCompact: self._compact,
            BeginCapture: self._capture,
            Replay: lambda message: self._graphs[message.graph].replay(),
            DropGraphs: self._drop_graphs,
            OverlapLaunches: lambda message: DeviceGraphs(self._device).overlap_launches(message.enabled),
        }

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return self._connected.gather(x, widths)

    def add(self, x: torch.Tensor) -> None:
        self._connected.add(x)

    @property
    def _connected(self) -> Collectives:
        assert self._collectives is not None  # Connect is the first message
        return self._collectives

    def _connect(self, message: Connect) -> None:
        self._collectives = Collectives(message.path, *self._place)

    def _forward(self, message: DeviceForward) -> None:
        self._rope.ensure(message.positions)
        pages = self._caches[message.cache].pages
        packed = torch.empty(packed_size(message, self._hidden), dtype=torch.int32, device=self._device)
        self._connected.broadcast(packed)
        self._last = own = PackedRows.of(message, self._hidden, packed)
        place = (pages.k, pages.v, own.block_table, own.lengths)
        known = {} if message.chains is None else {"chains": PromptChains(message.chains)}
        self.decoder(own.rows, *place, *self._rope.cos_sin, inputs=own.inputs, **known)

    def _compact(self, message: DeviceCompact) -> None:
        assert self._last is not None  # a pass comes first
        requests, nodes = message.requests, message.nodes
        packed = torch.empty(requests * (nodes + 1), dtype=torch.int32, device=self._device)
        self._connected.broadcast(packed)
        path, path_length = packed.split([requests * nodes, requests])
        place = self._last.block_table, self._last.lengths
        self._caches[message.cache].compact(*place, path.view(requests, nodes), path_length)

    def _capture(self, message: BeginCapture) -> None:
        """Captures what the next messages ask for. What they free waits: a graph must not end during a capture."""
        freed = list[object]()

        def run() -> None:
            while not isinstance(following := self._receive(), EndCapture):
                if isinstance(following, DropCaches | DropGraphs):
                    freed.append(following)
                else:
                    self._handle(following)

        pool = message.pool
        if pool is not None and pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        own = self._pools.get(pool)
        self._graphs[message.graph] = capture_graph(run, self._device, pool=own, warm_up=lambda: None)
        for each in freed:
            self._handle(each)

    def _drop_graphs(self, message: DropGraphs) -> None:
        for number in message.graphs:
            self._graphs.pop(number, None)  # None: the first rank failed before it began to capture
