"""The cycles whose launches are recorded: of every drafter and rule, at widths from plain decoding to the largest tree.

Drafters on the host share one cycle: its trees are copied to the device before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from specengine.engine.device.cycle_graphs import widths_up_to
from specengine.models.transformer import Transformer
from specengine.rules import RULES
from tests.drafters import (
    block_files,
    block_heads,
    eagle_files,
    fasteagle_files,
    glide_files,
    medusa_files,
    p_eagle_files,
    pard_files,
)
from tests.fake_cuda.build import FakeMachine
from tests.fake_cuda.launches import Launches

RECORDED = Path(__file__).with_name("launches.json")
CATCH_UP = "catch-up"  # between two cycles


class Case(NamedTuple):
    """A drafter, in whose spec a name stands for a folder of write_drafters(), and a rule."""

    spec: str
    rule: str = "match"


DRAFTERS = {
    "none": "none",
    "prompt_lookup": "prompt_lookup",
    "eagle3, a chain of 7": "eagle3:{eagle3},top_k=1,levels=7,nodes=8",
    "eagle3": "eagle3:{eagle3}",
    "eagle3, layers out of order": "eagle3:{unordered},top_k=1,levels=3,nodes=4",
    "eagle3, a norm per layer": "eagle3:{normed},top_k=1,levels=3,nodes=4",
    "eagle": "eagle:{eagle},levels=3,nodes=12",
    "eagle, a given tree": "eagle:{eagle},tree=eagle_25",
    "fasteagle": "fasteagle:{fasteagle}",
    "combine": "combine:prompt_lookup+eagle3:{eagle3};top_k=1;levels=7;nodes=8,nodes=8",
    "medusa": "medusa:{medusa},nodes=8",
    "glide": "glide:{glide}",
    "pard, a chain": "pard:{pard},tree=chain",
    "pard, ddtree": "pard:{pard},nodes=16",
    "p_eagle": "p-eagle:{p_eagle},nodes=16",
    "dflash, a chain": "dflash:{dflash},tree=chain",
    "jetspec": "jetspec:{jetspec},nodes=16",
    "dspark": "dspark:{dspark},nodes=16",
    "domino": "domino:{domino},nodes=16",
}
CASES = {name: Case(spec) for name, spec in DRAFTERS.items()}
CASES |= {f"draft_model, {rule}": Case("draft_model:self,layers=1,length=3", rule) for rule in RULES}


def write_drafters(folder: Path) -> dict[str, Path]:
    """Writes random drafters for the tiny model."""
    torch.manual_seed(3)
    layouts = eagle_files.layouts()
    named = {"eagle3": "official", "unordered": "layers by their outputs", "normed": "a norm per feature"}
    named["eagle"] = "eagle 1"
    made = {name: eagle_files.write_drafter(folder / name, *layouts[layout][1:]) for name, layout in named.items()}
    made["fasteagle"] = fasteagle_files.random_fasteagle(folder / "fasteagle")[0]
    made["medusa"] = medusa_files.write(folder / "medusa", medusa_files.heads_state(vocab=0))
    blocks = {"dflash": (block_files.DFLASH, block_files.backbone_state(block_files.DFLASH))}
    blocks["jetspec"] = (block_files.JETSPEC, blocks["dflash"][1])
    blocks["dspark"] = (block_heads.DSPARK, block_heads.dspark_state())
    blocks["domino"] = (block_heads.DOMINO, block_heads.domino_state())
    made |= {name: block_files.write(folder / name, *each) for name, each in blocks.items()}
    made["pard"] = pard_files.write_pard(folder / "pard")
    made["p_eagle"] = p_eagle_files.write_p_eagle(folder / "p_eagle")
    glide = {**glide_files.JSON, "num_hidden_layers": 1}
    made["glide"] = glide_files.write(folder / "glide", glide_files.glide_state(glide), glide)
    for place in made.values():
        round_weights(place)
    return made


def round_weights(folder: Path) -> None:
    """Gives the matrices of a checkpoint the dtype of its target's, as published ones have it."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}, file)


def launches_of(machine: FakeMachine, target: Transformer, case: Case, folders: dict[str, Path]) -> dict[str, Launches]:
    """Returns the launches of a cycle at every captured width, and of a catch-up where the drafter has one."""
    engine = machine.engine(target, case.spec.format(**folders), case.rule)
    found = {str(nodes): engine.captured(nodes) for nodes in widths_up_to(engine.drafter.max_nodes)}
    late = engine.catch_up()
    return found if late is None else found | {CATCH_UP: late}


def totals(launches: dict[str, Launches]) -> dict[str, dict[str, int]]:
    """Returns the numbers of all widths, as they are recorded."""
    return {width: each.totals for width, each in launches.items()}


def recorded() -> dict[str, dict[str, dict[str, int]]]:
    """Returns the recorded numbers, by case and width."""
    return json.loads(RECORDED.read_text())
