"""Where tests of the ops run: the CPU, the CUDA kernels on the simulator, the CUDA kernels on a GPU."""

import sys
from dataclasses import dataclass

import pytest
import torch

from specengine import _C


@dataclass(frozen=True)
class Backend:
    """Where the ops of a test run, and where their tensors have to be."""

    name: str  # cpu | sim | gpu
    device: torch.device

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


CUDA_BACKENDS = [pytest.param("sim", marks=pytest.mark.sim), pytest.param("gpu", marks=pytest.mark.gpu)]


def cuda_backend_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if request.param == "gpu":
        if not _C.cuda_architectures or not torch.cuda.is_available():
            pytest.skip("no GPU, or no CUDA in this build or in torch")
        return Backend("gpu", torch.device("cuda"))
    simulated = request.getfixturevalue("simulated")
    for name, module in list(sys.modules.items()):
        if name.startswith("specengine.ops") and getattr(module, "_C", None) is _C:
            monkeypatch.setattr(module, "_C", simulated)
    return Backend("sim", torch.device("cpu"))
