"""Puts a stand-in device in the place of torch.cuda, for one test."""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from specengine import _C, ops
from specengine.utils import cuda_graphs
from tests.backends import use_core
from tests.cuda_standin.core import Core
from tests.cuda_standin.device import Device
from tests.cuda_standin.dispatch import Dispatch
from tests.cuda_standin.events import Event
from tests.cuda_standin.graphs import Graph
from tests.cuda_standin.streams import Stream

GIB = 1 << 30
CUDA_INDEX, META_INDEX, DEVICE_TYPES = 1, 14, 20  # of c10::DeviceType


@contextmanager
def standing_in(device: Device, monkeypatch: pytest.MonkeyPatch, core=_C) -> Iterator[Device]:
    """Lets torch and the engine see a GPU. Fails at the end where anything was refused unexpectedly."""
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):  # one that is imported later keeps the core
        importlib.import_module(module.name)
    _patch_torch(device, monkeypatch)
    use_core(Core(core, device), monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_devices", {})
    monkeypatch.setattr(_C, "set_programmatic_launch", lambda enabled: None, raising=False)
    run = threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with _tensors_on(device):
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_in_mode)
    with _guard(), _tensors_on(device):
        yield device
    assert not device.refusals.seen, device.refusals.seen


def _patch_torch(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    event, graph = type("Event", (Event,), {"device": device}), type("Graph", (Graph,), {"device": device})

    @contextmanager
    def stream(of: Stream | None) -> Iterator[None]:
        before = device.stream
        device.stream = of or before
        try:
            yield
        finally:
            device.stream = before

    patched = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device": lambda _: nullcontext(),
        "get_device_name": lambda _=None: "stand-in",
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_properties": lambda _=None: SimpleNamespace(L2_cache_size=1 << 10),
        "mem_get_info": lambda _=None: (4 * GIB - device.allocator.reserved, 4 * GIB),
        "synchronize": device.synchronize,
        "empty_cache": device.empty_cache,
        "Stream": lambda _=None: device.new_stream(),
        "current_stream": lambda _=None: device.stream,
        "default_stream": lambda _=None: device.default_stream,
        "stream": stream,
        "Event": event,
        "CUDAGraph": graph,
        "graph_pool_handle": device.new_handle,
    }
    for name, value in patched.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
        monkeypatch.setattr(torch._C, name, lambda: None, raising=False)


@contextmanager
def _guard() -> Iterator[None]:
    """A torch without CUDA cannot enter a CUDA device; the guard of the meta device, which does nothing, can."""
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[CUDA_INDEX]
    guards[CUDA_INDEX] = guards[META_INDEX]
    try:
        yield
    finally:
        guards[CUDA_INDEX] = before


@contextmanager
def _tensors_on(device: Device) -> Iterator[None]:
    """Gives the operations of this thread to the stand-in; `torch.tensor` too makes a CPU tensor and copies it."""
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with Dispatch(device):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
