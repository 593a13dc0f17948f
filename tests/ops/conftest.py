"""Fixtures of the op tests."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from specengine import _C

NARROW = [name for name in _C.instruction_sets if name in ("portable", "avx2")]


@pytest.fixture(params=NARROW)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set that every op is built for."""
    with _active(request.param):
        yield request.param


@pytest.fixture(params=_C.instruction_sets)
def wide_instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set of this build and machine, for the ops that are built for all of them."""
    with _active(request.param):
        yield request.param


@dataclass(frozen=True)
class Backend:
    """Where the ops of a test run, and where their tensors have to be."""

    name: str  # cpu | sim | gpu
    device: torch.device

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


CUDA_BACKENDS = [pytest.param("sim", marks=pytest.mark.sim), pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=[*NARROW, *CUDA_BACKENDS])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Runs the test on the CPU once per instruction set that every op is built for, simulated and on a GPU."""
    if request.param in NARROW:
        with _active(request.param):
            yield Backend("cpu", torch.device("cpu"))
    else:
        yield _cuda(request, monkeypatch)


@pytest.fixture(params=CUDA_BACKENDS)
def cuda_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Runs the test on the CUDA kernels, simulated and on a GPU."""
    return _cuda(request, monkeypatch)


def _cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if request.param == "gpu":
        if not _C.cuda_architectures or not torch.cuda.is_available():
            pytest.skip("no GPU, or no CUDA in this build or in torch")
        return Backend("gpu", torch.device("cuda"))
    simulated = request.getfixturevalue("simulated")
    for name, module in list(sys.modules.items()):
        if name.startswith("specengine.ops") and getattr(module, "_C", None) is _C:
            monkeypatch.setattr(module, "_C", simulated)
    return Backend("sim", torch.device("cpu"))


@contextmanager
def _active(name: str) -> Iterator[None]:
    before = _C.instruction_set()
    _C.set_instruction_set(name)
    yield
    _C.set_instruction_set(before)


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Undoes set_num_threads; keeps torch on one thread, whose barriers cost seconds on a busy machine."""
    native, reference = _C.num_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    _C.set_num_threads(native)
    torch.set_num_threads(reference)
