"""CUDA graphs and the stream they run on, in a process where other engines and threads use the device too."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_lock = threading.RLock()  # torch captures one graph at a time
_streams: dict[torch.device, torch.cuda.Stream] = {}


def stream_of(device: torch.device) -> AbstractContextManager:
    """Makes the one stream of a device the current one: its engines share pages, so their work must keep its order.

    Current device and stream belong to a thread; nothing to do for a device without streams.
    """
    if device.type != "cuda":
        return nullcontext()
    with _lock:
        if device not in _streams:
            torch.cuda.synchronize(device)  # weights were written on another one
            _streams[device] = torch.cuda.Stream(device)
    return torch.cuda.stream(_streams[device])


def capture_graph(
    run: Callable[[], object],
    device: torch.device,
    *,
    pool: _POOL_HANDLE | None = None,
    warm_up: Callable[[], object] | None = None,
) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches. It, or warm_up, runs before: what is set up at first use is not captured.

    pool: of memory, shared with other graphs that never run at the same time.
    """
    with _lock, stream_of(device):
        (warm_up or run)()
        torch.cuda.synchronize(device)
        # cuBLAS keeps a workspace per stream: it must be this graph's own, and no later graph's.
        torch._C._cuda_clearCublasWorkspaces()
        collects = gc.isenabled()
        gc.disable()  # a collection might free other graphs and pinned memory, which no capture survives
        try:
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream(device)
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        finally:
            if collects:
                gc.enable()
            torch._C._cuda_clearCublasWorkspaces()
        return graph
