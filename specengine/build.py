"""What was built, and what it runs on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from specengine import _C

try:
    __version__ = version("specengine")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"


def build_info() -> dict[str, Any]:
    """Version, compiler, instruction sets and CUDA architectures of this build, and what this machine uses of them."""
    return {
        "version": __version__,
        "compiler": _C.compiler,
        "instruction_sets": list(_C.instruction_sets),
        "instruction_set": _C.instruction_set(),
        "threads": _C.num_threads(),
        "cuda_architectures": _C.cuda_architectures.split(),
    }
