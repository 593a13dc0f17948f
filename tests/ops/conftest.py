"""Fixtures of the op tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specengine import _C
from tests.backends import CUDA_BACKENDS, Backend, cuda_backend_of

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


@pytest.fixture(params=[*NARROW, *CUDA_BACKENDS])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Runs the test on the CPU once per instruction set that every op is built for, simulated and on a GPU."""
    if request.param in NARROW:
        with _active(request.param):
            yield Backend("cpu", torch.device("cpu"))
    else:
        yield cuda_backend_of(request, monkeypatch)


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
