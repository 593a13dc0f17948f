"""Ranks whose devices are simulated: the CUDA kernels on the execution simulator, gloo between the processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specengine.ops import cuda_ops
from specengine.tensor_parallel import rank_processes, worker
from specengine.utils import host_memory
from tests.backends import use_core
from tests.simulator.build import simulator

ROOT = Path(__file__).resolve().parents[2]


def command(module: str) -> str:
    """The code of a rank's process that runs main() of a module of the tests, whose package is installed nowhere."""
    return (
        f"import json, sys; sys.path[:] = [*json.loads(sys.argv[1]), {str(ROOT)!r}]; "
        f"from {module} import main; main()  # specengine.tensor_parallel.worker"
    )


def simulate_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the ranks of later models run the CUDA kernels on the simulator, as the caller does."""
    monkeypatch.setattr(rank_processes, "_COMMAND", command("tests.tensor_parallel.simulated"))


def main() -> None:
    """Serves as worker.main() does, on the simulator."""
    core = simulator()
    core.set_schedule(0)
    core.set_multiprocessors(4)
    patch = pytest.MonkeyPatch()
    use_core(core, patch)
    patch.setattr(host_memory, "HOST_TYPES", frozenset())
    patch.setattr(worker, "ops_for", cuda_ops)
    worker.main(*map(int, sys.argv[2:4]))
