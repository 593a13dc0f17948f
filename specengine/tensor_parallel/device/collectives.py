"""What ranks do together on their devices: NCCL between GPUs, gloo in the CPU's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed

CONNECTING = timedelta(seconds=60)  # in which all ranks must have connected
# PyTorch's threads that look after NCCL would end this process where another rank fails, or where abort() waits long.
# They would also look into the store, whose file is gone once all ranks have connected.
_WITHOUT_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Collectives:
    """The ranks' devices. Every rank calls the same methods in the same order; a CUDA graph can capture them."""

    def __init__(self, path: str, rank: int, size: int, device: torch.device) -> None:
        """Waits for all ranks.  path: of a file by which they find each other. Raises RuntimeError without one."""
        self._size = size
        # This group is not torch's default one, which belongs to the caller. Torch's stubs give groups no methods: Any.
        store = distributed.FileStore(path, size)
        store.set_timeout(CONNECTING)
        if device.type == "cuda":
            with _without_watchdog():
                options = distributed.ProcessGroupNCCL.Options()
                self._group: Any = distributed.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = distributed.ProcessGroupGloo(store, rank, size, CONNECTING)
        self.add(torch.zeros(1, device=device))  # the first call connects

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Puts all ranks' x [M, widths[rank]] side by side, [M, sum(widths)] of x's dtype."""
        most = max(widths)
        own = F.pad(x, (0, most - x.shape[1])) if x.shape[1] < most else x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._size)]
        # Bytes, because gloo moves no bfloat16.
        self._group.allgather([[part.view(torch.uint8) for part in parts]], [own.view(torch.uint8)]).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def add(self, x: torch.Tensor) -> None:
        """Adds up all ranks' x, in place."""
        self._group.allreduce([x]).wait()

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrites x by that of rank 0."""
        self._group.broadcast([x]).wait()

    def abort(self) -> None:
        """Ends the connection, and what the device waits for; also after another rank failed.

        The device stops waiting at once, but NCCL returns only when no graph with its calls is left: no thread that
        others wait for may call this.
        """
        self._group.abort()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Lets no thread of PyTorch end this process; the group's own messages tell of failures."""
    before = {name: os.environ.get(name) for name in _WITHOUT_WATCHDOG}
    os.environ.update(_WITHOUT_WATCHDOG)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
