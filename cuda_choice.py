"""Decides which GPUs the CUDA sources are compiled for: setup.py imports this file, CMakeLists.txt runs it.

SPECENGINE_CUDA, in the environment or as an option of CMake, is one of:

    unset  the visible GPUs; without one CUDA is left out
    1      the visible GPUs, or all supported ones where none is visible; an error without nvcc
    all    all supported GPUs; an error without nvcc
    0      CUDA is left out

CMake's option SPECENGINE_CUDA_ARCHITECTURES names the architectures instead; that too is an error without nvcc.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

ALL = "80-real;90a-real;90-virtual"
UNKNOWN = "unknown"
OPTION = re.compile(r"-D\s*(SPECENGINE_CUDA(?:_ARCHITECTURES)?)(?::\w+)?=(\S*)")
SPELLINGS = {"": "", "0": "0", "off": "0", "1": "1", "on": "1", "all": "all"}


class Choice(NamedTuple):
    """architectures: as CMake names them, empty without CUDA; required: a missing nvcc is an error; reason: a line."""

    architectures: str
    required: bool
    reason: str


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Returns the compute capabilities of the visible GPUs; UNKNOWN for device files without a word of nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        found = re.findall(r"^\d+\.\d+$", done.stdout, re.MULTILINE)
    except (OSError, subprocess.TimeoutExpired):
        found = []
    return found or ([UNKNOWN] if any(devices.glob("nvidia[0-9]*")) else [])


def architectures_of(capability: str) -> str:
    """Returns what a GPU of this compute capability needs; empty for one that the kernels do not support."""
    if capability == UNKNOWN:
        return ALL
    major, minor = map(int, capability.split("."))
    if major < 8:
        return ""
    if major > 9:
        return "90-virtual"  # which the driver compiles at first use
    return "90a-real" if (major, minor) == (9, 0) else f"{major}{minor}-real"


def choose(cuda: str = "", architectures: str = "", gpus: Callable[[], list[str]] = visible_gpus) -> Choice:
    """Decides by the values of SPECENGINE_CUDA and SPECENGINE_CUDA_ARCHITECTURES. Raises ValueError for a bad value."""
    if cuda.lower() not in SPELLINGS:
        raise ValueError(f"SPECENGINE_CUDA: expected 0, 1 or all, got {cuda!r}")
    asked = SPELLINGS[cuda.lower()]
    if asked == "0":
        return Choice("", False, "CUDA is left out, as asked for")
    if architectures or asked == "all":
        return Choice(architectures or ALL, True, f"CUDA is compiled for {architectures or ALL}, as asked for")
    found = gpus()
    needed = ";".join(dict.fromkeys(filter(None, map(architectures_of, found))))
    if needed:
        return Choice(needed, asked == "1", f"CUDA is compiled for {needed}, for the visible GPU {', '.join(found)}")
    missing = "no GPU is visible" if not found else f"the visible GPU {', '.join(found)} is older than 8.0"
    if asked == "1":
        return Choice(ALL, True, f"CUDA is compiled for {ALL}, as {missing}")
    return Choice("", False, f"CUDA is left out, as {missing}; SPECENGINE_CUDA=1 in the environment asks for it")


def choose_for(environment: Mapping[str, str], gpus: Callable[[], list[str]] = visible_gpus) -> Choice:
    """Decides as CMake will with the CMAKE_ARGS and the SPECENGINE_CUDA of an environment."""
    options = dict(OPTION.findall(environment.get("CMAKE_ARGS", "")))
    cuda = options.get("SPECENGINE_CUDA") or environment.get("SPECENGINE_CUDA", "")
    return choose(cuda, options.get("SPECENGINE_CUDA_ARCHITECTURES", ""), gpus)


if __name__ == "__main__":
    try:
        choice = choose(sys.argv[1] or os.environ.get("SPECENGINE_CUDA", ""), sys.argv[2])
    except ValueError as error:
        sys.exit(str(error))
    print(choice.architectures, int(choice.required), choice.reason, sep="\n")
