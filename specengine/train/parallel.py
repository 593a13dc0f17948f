"""Processes that train together: each has its part of every step, gradients and counts are added up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

_PATIENCE = timedelta(days=2)  # the others wait while the first makes the data


@dataclass(frozen=True)
class World:
    """rank of size processes; one of its own where torchrun started none."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @staticmethod
    @contextmanager
    def joined(device: torch.device) -> Iterator[World]:
        """The processes torchrun started, as long as they are needed: over gloo on the CPU, nccl on CUDA."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            yield World(device)
            return
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
        try:
            yield World(device, distributed.get_rank(), distributed.get_world_size())
        finally:
            distributed.destroy_process_group()

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' x, in the place of x."""
        if self.size > 1:
            there = x.to(self.device)
            distributed.all_reduce(there)
            x.copy_(there)
        return x

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in one of them."""
        return bool(self.add_up(torch.tensor(float(flag))) > 0)

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            distributed.barrier()
