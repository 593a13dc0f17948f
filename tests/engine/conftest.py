"""Engines with a random drafter of every kind."""

import pytest
import torch

from specengine import Engine
from tests.drafters import (
    block_files,
    block_heads,
    eagle_files,
    fasteagle_files,
    glide_files,
    medusa_files,
    mtp_files,
    p_eagle_files,
    pard_files,
)
from tests.engine.prefixes import SPECS
from tests.engines import tiny_engine, tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random drafters of every kind for the tiny model."""
    folder = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(3)
    config = eagle_files.CONFIG | {"vocab_size": tiny_model().config.vocab_size}
    states = {"eagle": eagle_files.eagle1_state(config), "eagle3": eagle_files.eagle3_state(config)}
    made = {name: eagle_files.write_drafter(folder / name, config, state) for name, state in states.items()}
    made["fasteagle"] = fasteagle_files.random_fasteagle(folder / "fasteagle")[0]
    made["mtp"] = mtp_files.write_mtp(folder / "mtp", mtp_files.mtp_state(tiny_model().config))
    made["p_eagle"] = p_eagle_files.write_p_eagle(folder / "p_eagle")
    for name, own in (("dflash", block_files.DFLASH), ("jetspec", block_files.JETSPEC)):
        made[name] = block_files.write(folder / name, own, block_files.backbone_state(own))
    made["dspark"] = block_files.write(folder / "dspark", block_heads.DSPARK, block_heads.dspark_state())
    made["domino"] = block_files.write(folder / "domino", block_heads.DOMINO, block_heads.domino_state())
    made["pard"] = pard_files.write_pard(folder / "pard")
    made["pard2"] = pard_files.write_pard(folder / "pard2", pard_files.warp_state(tiny_model().config.hidden_size))
    made["medusa"] = medusa_files.write(folder / "medusa", medusa_files.heads_state(vocab=0))
    glide = {**glide_files.JSON, "num_hidden_layers": 1, "vocab_size": tiny_model().config.vocab_size}
    made["glide"] = glide_files.write(folder / "glide", glide_files.glide_state(glide), glide)
    return made


@pytest.fixture
def make(folders):
    def engine(name, **options) -> Engine:
        return tiny_engine(SPECS[name].format(**folders), **options)

    return engine
