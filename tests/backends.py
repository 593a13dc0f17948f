"""Where tests of the ops run: the CPU, the CUDA kernels on the simulator, the CUDA kernels on a GPU."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from specengine import _C, ops
from specengine.utils import host_memory


@dataclass(frozen=True)
class Backend:
    """Where the ops of a test run, and where their tensors have to be."""

    name: str  # cpu | sim | gpu
    device: torch.device

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


CUDA_BACKENDS = [pytest.param("sim", marks=pytest.mark.sim)]
if torch.cuda.is_available():
    CUDA_BACKENDS.append(pytest.param("gpu", marks=pytest.mark.gpu))


def cuda_backend_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if request.param == "gpu":
        if not _C.cuda_architectures or not torch.cuda.is_available():
            pytest.skip("no GPU, or no CUDA in this build or in torch")
        return Backend("gpu", torch.device("cuda"))
    simulated = request.getfixturevalue("simulated")
    simulated.set_schedule(0)  # a test runs alone as it runs among others
    simulated.set_multiprocessors(4)
    use_core(simulated, monkeypatch)
    monkeypatch.setattr(host_memory, "HOST_TYPES", frozenset())
    return Backend("sim", torch.device("cpu"))


def use_core(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another op table than the package's own for the rest of the test."""
    for found in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        importlib.import_module(found.name)  # drafters import some of the wrappers late
    for module in _ops_modules(_C):
        monkeypatch.setattr(module, "_C", core)


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """The CPU's own kernels for a while, in a test whose backend is the simulator."""
    with pytest.MonkeyPatch.context() as patch:
        for module in _ops_modules():
            patch.setattr(module, "_C", _C)
        patch.setattr(host_memory, "HOST_TYPES", frozenset({"cpu"}))
        yield


def _ops_modules(core: ModuleType | None = None) -> list[ModuleType]:
    """The wrappers of the ops, or those of them that call `core`."""
    modules = [module for name, module in sys.modules.items() if name.startswith("specengine.ops")]
    return [m for m in modules if hasattr(m, "_C") and core in (None, m._C)]
