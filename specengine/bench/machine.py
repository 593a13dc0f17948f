"""Where a measurement was made, and with what."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

import specengine
from specengine.bench.kernels.timers import GraphTimer, medians
from specengine.utils.build_info import cpu_name


def machine() -> dict[str, Any]:
    """CPU model, usable cores, memory in bytes, operating system, and what the build uses of them."""
    build = specengine.build_info()
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
    """Versions of the engine and what it runs on."""
    return {
        "specengine": specengine.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "compiler": specengine.build_info()["compiler"],
    }


def commit() -> str | None:
    """The source tree's git commit, `-dirty` if tracked files differ; None for an installed package."""
    root = Path(specengine.__file__).resolve().parents[1]
    # An environment inside somebody else's repository must not report that repository's commit.
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None
    return _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def bandwidth(device: torch.device) -> float:
    """Bytes per second between a device and its memory, over more than caches hold.

    The best of a few sums; on a GPU the median of copies, counting the bytes read and those written.
    """
    if device.type == "cuda":
        source = torch.randn(1 << 27, device=device)
        copies = GraphTimer([partial(torch.empty_like(source).copy_, source)] * 8)
        return 2 * source.nbytes / medians([copies], rounds=9)[0]
    data, best = torch.ones(1 << 26, dtype=torch.float32, device=device), 0.0
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best


class OthersCPU:
    """How many cores other processes keep busy, on average since this was made; None where it cannot be known."""

    def __init__(self) -> None:
        self._begin = self._now()

    def cores(self) -> float | None:
        (wall, busy, own), (wall_then, busy_then, own_then) = self._now(), self._begin
        if busy is None or busy_then is None or wall == wall_then:
            return None
        return max(0.0, (busy - busy_then) - (own - own_then)) / (wall - wall_then)

    @staticmethod
    def _now() -> tuple[float, float | None, float]:
        """Seconds: of the clock, of all processes' work, of this process's."""
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
