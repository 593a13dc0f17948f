"""A stand-in device for the tests of the stand-in itself."""

import gc

import pytest
import torch

from tests.cuda_standin.device import CUDA, Device
from tests.cuda_standin.install import standing_in


@pytest.fixture
def device(monkeypatch):
    """torch.cuda is the stand-in until the test ends."""
    with standing_in(Device(), monkeypatch) as standin:
        yield standin


class Captured:
    """Captures calls on a stream of its own, as the engine does."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def __call__(self, run, pool=None):
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # a collection may drop an earlier graph
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                run()
        finally:
            gc.enable()
        return graph

    def attempt(self, run) -> None:
        """Captures a call that is refused, and forgets the graph."""
        self(run)


@pytest.fixture
def capture(device):
    return Captured()


@pytest.fixture
def x(device):
    return torch.arange(8, dtype=torch.float32, device=CUDA)
