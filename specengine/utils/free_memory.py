"""How many bytes of memory this process may still fill."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that Linux could give without swapping, or a container's rest if that is less; None elsewhere.

    root: holds proc/meminfo and the container's sys/fs/cgroup (version 2).
    """
    found = [_available(root / "proc/meminfo"), _rest_of_container(root / "sys/fs/cgroup")]
    return min((each for each in found if each is not None), default=None)


def _available(meminfo: Path) -> int | None:
    with suppress(OSError):
        if line := re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.M):
            return int(line[1]) << 10
    return None


def _rest_of_container(group: Path) -> int | None:
    with suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())  # "max" without a limit
        used = int((group / "memory.current").read_text())
        files = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.M)
        return limit - used + (int(files[1]) if files else 0)  # the kernel takes cached files back first
    return None
