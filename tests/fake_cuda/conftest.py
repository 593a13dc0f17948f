"""A device that computes nothing, and a target on it."""

import pytest

from tests.fake_cuda.build import FakeMachine
from tests.fake_cuda.cases import write_drafters
from tests.fake_cuda.mode import FakeCuda


@pytest.fixture
def device():
    with FakeCuda() as device:
        yield device


@pytest.fixture
def machine(device, monkeypatch):
    return FakeMachine(device, monkeypatch)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of random drafters by name."""
    return write_drafters(tmp_path_factory.mktemp("drafters"))
