"""The version, the build of the native core, and the processor."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specengine import _C

try:
    __version__ = version("specengine")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"


WITHOUT_CUDA = (
    "built without CUDA; with nvcc >= 12 on PATH, build it again by "
    "`SPECENGINE_CUDA=1 pip install --force-reinstall --no-deps .`"
)


def build_info() -> dict[str, Any]:
    """Returns version, compiler, instruction sets and CUDA architectures of this build, and what this machine uses."""
    return {
        "version": __version__,
        "compiler": _C.compiler,
        "instruction_sets": list(_C.instruction_sets),
        "instruction_set": _C.instruction_set(),
        "threads": _C.num_threads(),
        "cuda_architectures": _C.cuda_architectures.split(),
    }


def cpu_name() -> str:
    """Returns the processor's name. On aarch64 Linux knows no name, so it is the part number."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("model name", "CPU part"))).partition(":")[2].strip()
    return platform.processor() or platform.machine()
