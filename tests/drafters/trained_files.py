"""Random checkpoints of every trained drafter, for the model tiny-llama."""

from pathlib import Path

import torch

from specengine.models.presets import PRESETS
from tests.drafters import block_files, block_heads, eagle_files, glide_files, medusa_files
from tests.drafters.fasteagle_files import random_fasteagle
from tests.drafters.mtp_files import mtp_state, write_mtp
from tests.drafters.p_eagle_files import write_p_eagle
from tests.drafters.pard_files import pard_state, write_pard

# jetspec is the class of dflash
TRAINED = ("dflash", "domino", "dspark", "eagle", "eagle3", "fasteagle", "glide", "medusa", "mtp", "p_eagle", "pard")


def write_trained(folder: Path) -> dict[str, str]:
    """Writes a folder for each; returns `NAME:PATH` by name."""
    torch.manual_seed(3)
    pard = pard_state()
    pard["lm_head.weight"] *= 2  # flat distributions are hard to tell from flatter ones
    paths = {
        "eagle": eagle_files.write_drafter(
            folder / "eagle", eagle_files.CONFIG, eagle_files.eagle1_state(eagle_files.CONFIG)
        ),
        "eagle3": eagle_files.write_drafter(
            folder / "eagle3", eagle_files.CONFIG, eagle_files.eagle3_state(eagle_files.CONFIG)
        ),
        "fasteagle": random_fasteagle(folder / "fasteagle", markov=8)[0],
        "glide": glide_files.write(folder / "glide", glide_files.glide_state()),
        "medusa": medusa_files.write(folder / "medusa", medusa_files.heads_state()),
        "mtp": write_mtp(folder / "mtp", mtp_state(PRESETS["tiny-llama"])),
        "p_eagle": write_p_eagle(folder / "p_eagle"),
        "pard": write_pard(folder / "pard", state=pard),
    }
    torch.manual_seed(3)
    block = block_files.backbone_state(block_files.DFLASH)
    block["norm.weight"] *= 2
    paths["dflash"] = block_files.write(folder / "dflash", block_files.DFLASH, block)
    torch.manual_seed(6)  # of sharp distributions: flatter ones are easily told from them
    paths["jetspec"] = block_files.write(
        folder / "jetspec", block_files.JETSPEC, block_files.backbone_state(block_files.DFLASH)
    )
    heads = {
        "dspark": (block_heads.DSPARK, block_heads.dspark_state()),
        "domino": (block_heads.DOMINO, block_heads.domino_state()),
    }
    for name, (config, state) in heads.items():
        state["norm.weight"] *= 2
        paths[name] = block_files.write(folder / name, config, state)
    return {name: f"{name}:{path}" for name, path in paths.items()}
