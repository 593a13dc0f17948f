"""CUDA graphs and their stream, in a process whose other engines and threads use the same device."""

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
    """Returns a context in which this thread uses the one stream that all engines of a device share.

    Engines share cache pages, so their work must run in order. The context does nothing for a device without streams.
    """
    if device.type != "cuda":
        return nullcontext()
    with _lock:
        if device not in _streams:
            torch.cuda.synchronize(device)  # another stream wrote the weights
            _streams[device] = torch.cuda.Stream(device)
    return torch.cuda.stream(_streams[device])


def capture_graph(
    run: Callable[[], object],
    device: torch.device,
    *,
    pool: _POOL_HANDLE | None = None,
    warm_up: Callable[[], object] | None = None,
) -> torch.cuda.CUDAGraph:
    """Captures the kernels that `run` launches as a CUDA graph.

    warm_up: called once before the capture; `run` by default. A set-up at first use must not be captured.
    pool: memory pool, shared with graphs that never run at the same time.
    """
    with _lock, stream_of(device):
        (warm_up or run)()
        torch.cuda.synchronize(device)
        # cuBLAS keeps one workspace per stream. This graph needs its own, and no later graph may reuse it.
        torch._C._cuda_clearCublasWorkspaces()
        collects = gc.isenabled()
        gc.disable()  # a collection may free graphs or pinned memory, which would break the capture
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
