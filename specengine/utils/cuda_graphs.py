"""CUDA graphs and their streams, in a process whose other engines and threads use the same device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from specengine import _C
from specengine.utils.fair_lock import FairLock

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


@dataclass(eq=False)
class _Shared:
    """What all engines of a device share.  streams: to work on and to capture on; made at the first turn."""

    turn: FairLock = field(default_factory=FairLock)
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None


_lock = threading.RLock()  # torch captures one graph at a time
_devices: dict[torch.device, _Shared] = {}


@contextmanager
def device_turn(device: torch.device) -> Iterator[None]:
    """Gives a device to this thread, on the one stream of all engines, until the context ends; it cannot be nested.

    Engines share cache pages, so their work must run in order. A capture must be alone: work or a synchronisation of
    another thread would break it. A device without streams has turns too.
    """
    shared = _shared(device)
    with shared.turn:
        if device.type != "cuda":
            yield
            return
        with torch.cuda.stream(_streams(shared, device)[0]):
            yield


def capture_graph(
    run: Callable[[], object],
    device: torch.device,
    *,
    pool: _POOL_HANDLE | None = None,
    warm_up: Callable[[], object] | None = None,
) -> torch.cuda.CUDAGraph:
    """Captures the kernels that `run` launches as a CUDA graph; to be called in a turn where others use the device.

    warm_up: called once before the capture; `run` by default. A set-up at first use must not be captured.
    pool: memory pool, shared with graphs that never run at the same time; None makes one. A pool needs a graph that is
      alive: it ends with its last graph, and must not be used again.
    """
    with _lock:
        (warm_up or run)()
        torch.cuda.synchronize(device)
        # cuBLAS keeps one workspace per stream. This graph needs its own, and no later graph may reuse it.
        torch._C._cuda_clearCublasWorkspaces()
        collects = gc.isenabled()
        gc.disable()  # a collection may free graphs or pinned memory, which would break the capture
        try:
            graph = torch.cuda.CUDAGraph()
            # A stream of captures alone: work that another thread launched on it would be captured too.
            stream = _streams(_shared(device), device)[1]
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        finally:
            if collects:
                gc.enable()
            torch._C._cuda_clearCublasWorkspaces()
        return graph


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Launches its kernels."""
        ...


class DeviceGraphs:
    """Captures graphs on one device and waits for its events. A model on several devices has its own class for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self, run: Callable[[], object], pool: _POOL_HANDLE | None = None) -> Graph:
        """Captures `run`, which runs once before; see capture_graph()."""
        return capture_graph(run, self._device, pool=pool)

    def overlap_launches(self, enabled: bool) -> None:
        """Chooses whether kernels launched from now on start before their predecessors end."""
        _C.set_programmatic_launch(enabled)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Waits for an event."""
        event.synchronize()


def _shared(device: torch.device) -> _Shared:
    with _lock:
        return _devices.setdefault(device, _Shared())


def _streams(shared: _Shared, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    with _lock:
        if shared.streams is None:
            shared.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return shared.streams
