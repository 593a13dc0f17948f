"""A stand-in device for the tests of captured engines."""

import pytest

from tests.cuda_standin.device import Device
from tests.cuda_standin.install import standing_in


@pytest.fixture
def device(monkeypatch):
    """torch.cuda is a stand-in that runs nothing."""
    with standing_in(Device(dry=True), monkeypatch) as standin:
        yield standin
