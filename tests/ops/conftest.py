"""Fixtures of the op tests."""

from collections.abc import Iterator

import pytest
import torch

from specengine import _C


@pytest.fixture(params=_C.instruction_sets)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set of the build."""
    before = _C.instruction_set()
    try:
        _C.set_instruction_set(request.param)
    except ValueError:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    _C.set_instruction_set(before)


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Undoes set_num_threads; keeps torch on one thread, whose barriers cost seconds on a busy machine."""
    native, reference = _C.num_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    _C.set_num_threads(native)
    torch.set_num_threads(reference)
