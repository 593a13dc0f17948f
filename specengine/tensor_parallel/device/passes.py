"""Passes of several devices: messages have the shapes of a pass, and its rows go from device to device."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.ops.verify_tree import Accepted
from specengine.tensor_parallel.device.collectives import Collectives
from specengine.tensor_parallel.device.messages import (
    BeginCapture,
    Connect,
    DeviceCompact,
    DeviceForward,
    EndCapture,
    OverlapLaunches,
    Replay,
)
from specengine.tensor_parallel.device.packed_rows import pack_rows
from specengine.tensor_parallel.group import Group
from specengine.tensor_parallel.passes import Add, Gather, RankPass
from specengine.types import RankFailed
from specengine.utils.cuda_graphs import DeviceGraphs, Graph, capture_graph

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class DevicePasses(DeviceGraphs):
    """The first rank's side of passes and graphs on several devices."""

    def __init__(self, group: Group, size: int, device: torch.device) -> None:
        """Connects the devices. Raises RankFailed."""
        super().__init__(device)
        self._group, self._numbers = group, count()
        folder = tempfile.mkdtemp()
        try:
            path = str(Path(folder) / "ranks")
            with group.broadcast(Connect(path)):
                self._collectives = Collectives(path, 0, size, device)
        finally:
            shutil.rmtree(folder)
        group.call_after_end(self._collectives.abort)
        self.gather: Gather = self._collectives.gather
        self.add: Add | None = self._collectives.add

    @contextmanager
    def run(self, rank_pass: RankPass) -> Iterator[None]:
        tree, batch, chains = rank_pass.tree, rank_pass.batch, rank_pass.chains
        message = DeviceForward(
            cache=rank_pass.cache,
            rows=len(tree.tokens),
            requests=len(batch.lengths),
            pages=batch.block_table.shape[1],
            words=0 if tree.ancestors is None else tree.ancestors.shape[1],
            chains=None if chains is None else chains.chains,
            positions=rank_pass.positions,
        )
        columns = (tree.depths, tree.row_start, tree.ancestors, batch.block_table, batch.lengths)
        with self._group.broadcast(message):
            self._collectives.broadcast(pack_rows(rank_pass.inputs, *columns))
            yield

    @contextmanager
    def compact(self, cache: int, batch: CacheBatch, accepted: Accepted) -> Iterator[None]:
        requests, nodes = accepted.path.shape
        with self._group.broadcast(DeviceCompact(cache, requests, nodes)):
            self._collectives.broadcast(torch.cat([accepted.path.flatten(), accepted.path_length]))
            yield

    def capture(self, run: Callable[[], object], pool: _POOL_HANDLE | None = None) -> Graph:
        """Captures `run` in all ranks, each its part, after they all ran it once."""
        number = next(self._numbers)

        def run_captured() -> None:
            self._send(BeginCapture(number, pool))
            try:
                run()
            finally:  # behind an error too: the other ranks would capture all passes that follow
                if self._group.failure is None:
                    self._send(EndCapture())

        try:
            graph = capture_graph(run_captured, self._device, pool=pool, warm_up=run)
        except BaseException:
            self._group.drop_graph(number)  # the others may have captured it, also where it fails behind EndCapture
            raise
        return RankGraph(number, graph, self._group)

    def overlap_launches(self, enabled: bool) -> None:
        self._send(OverlapLaunches(enabled))
        super().overlap_launches(enabled)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Waits for an event. Raises RankFailed where a rank ended or hangs: nobody knows then what was computed."""
        with self._group.waiting():
            event.synchronize()  # ends after abort() at the latest
        if (reason := self._group.failure) is not None:
            raise RankFailed(f"tensor_parallel: {reason}; make a new engine")

    def _send(self, message: object) -> None:
        with self._group.broadcast(message):
            pass


class RankGraph:
    """The first rank's part of a graph; the other ranks replay theirs with it."""

    def __init__(self, number: int, graph: Graph, group: Group) -> None:
        self._number, self._graph, self._group = number, graph, group
        weakref.finalize(self, group.drop_graph, number).atexit = False

    def replay(self) -> None:
        """Launches its kernels in all ranks. Raises RankFailed."""
        with self._group.broadcast(Replay(self._number)):
            self._graph.replay()
