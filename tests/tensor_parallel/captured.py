"""Ranks on stand-in devices that capture graphs: the kernels of the simulator, gloo between the processes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from specengine.ops import Ops, cuda_ops
from specengine.tensor_parallel import rank_processes, worker
from specengine.tensor_parallel.device import follower, passes
from specengine.tensor_parallel.device.collectives import Collectives
from tests.cuda_standin.device import CUDA, Device
from tests.cuda_standin.install import standing_in
from tests.cuda_standin.tensors import DeviceTensor
from tests.simulator.build import simulator
from tests.tensor_parallel.simulated import command

RANKS = 2


class StandinCollectives(Collectives):
    """Launches each call on a stand-in device, so that its graphs record it; gloo moves the memory behind it."""

    device: Device

    def __init__(self, path: str, rank: int, size: int, device: torch.device) -> None:
        super().__init__(path, rank, size, torch.device("cpu"))

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        out, whole = x.new_empty(len(x), sum(widths)), super().gather
        assert isinstance(x, DeviceTensor) and isinstance(out, DeviceTensor)
        self.device.launch(lambda: out.inner.copy_(whole(x.inner, widths)), [x.block], [out.block], name="gather")
        return out

    def add(self, x: torch.Tensor) -> None:
        self._launch("add", x)

    def broadcast(self, x: torch.Tensor) -> None:
        self._launch("broadcast", x)

    def _launch(self, name: str, x: torch.Tensor) -> None:
        call = getattr(super(), name)
        if isinstance(x, DeviceTensor):
            self.device.launch(lambda: call(x.inner), [x.block], [x.block], name=name)
        else:
            call(x)


def standin_ops(device: torch.device, strict: bool) -> Ops:
    """The CUDA kernels; products are not measured, because no time passes on the stand-in."""
    return dataclasses.replace(cuda_ops(CUDA, strict), tune=None)


@contextmanager
def captured_ranks(patch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Puts a stand-in device in this process, and another one in each rank of later models."""
    core = simulator()
    core.set_schedule(0)
    core.set_multiprocessors(4)
    device = Device()
    with standing_in(device, patch, core=core):
        patch.setattr(StandinCollectives, "device", device, raising=False)
        for module in (passes, follower):
            patch.setattr(module, "Collectives", StandinCollectives)
        patch.setattr(rank_processes, "_COMMAND", command("tests.tensor_parallel.captured"))
        patch.setattr(torch.cuda, "device_count", lambda: RANKS)
        patch.setattr(torch.cuda, "set_device", lambda _: None)
        patch.setattr(worker, "ops_for", standin_ops)
        yield device


def main() -> None:
    """Serves as worker.main() does, on a stand-in."""
    with captured_ranks(pytest.MonkeyPatch()):
        worker.main(*map(int, sys.argv[2:4]))
