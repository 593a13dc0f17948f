"""Adapters of the tiny model, for the tests of engines."""

import pytest

from specengine.models.presets import PRESETS
from tests.adapters.files import write_adapter


@pytest.fixture(scope="session")
def adapters(tmp_path_factory):
    """Three adapters of tiny-llama, of different ranks and modules."""
    folder, config = tmp_path_factory.mktemp("adapters"), PRESETS["tiny-llama"]
    return {
        "a": write_adapter(folder / "a", config, rank=4, seed=1),
        "b": write_adapter(folder / "b", config, rank=20, seed=2, modules=("q_proj", "v_proj", "down_proj")),
        "c": write_adapter(folder / "c", config, rank=1, seed=3, modules=("o_proj", "gate_proj", "up_proj")),
    }
