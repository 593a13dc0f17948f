"""The processes of one training run: each computes a part of every step, and gradients and counts are summed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

_TIMEOUT = timedelta(days=2)  # the others wait while the first process makes the data


@dataclass(frozen=True)
class ProcessGroup:
    """Process `rank` of `size` processes; a single process without torchrun."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @staticmethod
    @contextmanager
    def joined(device: torch.device) -> Iterator[ProcessGroup]:
        """Joins the processes that torchrun started, over gloo on the CPU and nccl on CUDA; leaves them at the end."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            yield ProcessGroup(device)
            return
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        try:
            yield ProcessGroup(device, distributed.get_rank(), distributed.get_world_size())
        finally:
            distributed.destroy_process_group()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over all processes, in place."""
        if self.size > 1:
            there = x.to(self.device)
            distributed.all_reduce(there)
            x.copy_(there)
        return x

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set in any process."""
        return bool(self.all_reduce(torch.tensor(float(flag))) > 0)

    def barrier(self) -> None:
        """Waits until all processes are here."""
        if self.size > 1:
            distributed.barrier()
