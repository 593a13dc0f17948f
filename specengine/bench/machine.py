"""The machine and the versions of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch

from specengine.utils.build_info import __version__, build_info, cpu_name


def machine() -> dict[str, Any]:
    """Returns CPU model, usable cores, bytes of memory, operating system, GPU, threads and instruction set."""
    build = build_info()
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _memory_bytes(),
        "os": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": build["threads"],
        "instruction_set": build["instruction_set"],
    }


def versions() -> dict[str, str]:
    """Returns the versions of the engine and its dependencies."""
    return {
        "specengine": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "compiler": build_info()["compiler"],
    }


def commit() -> str | None:
    """Returns the git commit of the source tree, `-dirty` if tracked files differ; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    # A virtual environment inside another repository must not report the commit of that repository.
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None
    return _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


class OthersCPU:
    """Measures how many cores other processes kept busy since it was made."""

    def __init__(self) -> None:
        self._begin = self._now()

    def cores(self) -> float | None:
        """Returns the mean number of cores, None on a system without /proc/stat."""
        wall, busy, own = self._now()
        wall_then, busy_then, own_then = self._begin
        if busy is None or busy_then is None or wall == wall_then:
            return None
        return max(0.0, (busy - busy_then) - (own - own_then)) / (wall - wall_then)

    @staticmethod
    def _now() -> tuple[float, float | None, float]:
        """Returns seconds of the clock, of CPU time of all processes, and of CPU time of this process."""
        own = os.times()
        busy = None
        with suppress(OSError, ValueError, IndexError):
            user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
            busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return own.elapsed, busy, own.user + own.system + own.children_user + own.children_system


def _git(folder: Path, *arguments: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()
    return None


def _memory_bytes() -> int | None:
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
