"""The cycles whose launches are recorded: a drafter of every kind, at widths from plain decoding to its largest tree."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from specengine.engine.device.cycle_graphs import widths_up_to
from tests.drafters import eagle_files, fasteagle_files, glide_files, medusa_files
from tests.fake_cuda.build import FakeMachine
from tests.fake_cuda.launches import Launches

RECORDED = Path(__file__).with_name("launches.json")
SPECS = {
    "none": "none",
    "prompt_lookup": "prompt_lookup",
    "eagle3, a chain of 7": "eagle3:{eagle3},top_k=1,levels=7,nodes=8",
    "eagle3": "eagle3:{eagle3}",
    "eagle3, layers out of order": "eagle3:{unordered},top_k=1,levels=3,nodes=4",
    "eagle3, a norm per layer": "eagle3:{normed},top_k=1,levels=3,nodes=4",
    "eagle": "eagle:{eagle},levels=3,nodes=12",
    "eagle, a given tree": "eagle:{eagle},tree=eagle_25",
    "fasteagle": "fasteagle:{fasteagle}",
    "medusa": "medusa:{medusa},nodes=8",
    "glide": "glide:{glide}",
}


def write_drafters(folder: Path) -> dict[str, Path]:
    """Writes random drafters for the tiny model."""
    torch.manual_seed(3)
    layouts = eagle_files.layouts()
    named = {"eagle3": "official", "unordered": "layers by their outputs", "normed": "a norm per feature"}
    named["eagle"] = "eagle 1"
    made = {name: eagle_files.write_drafter(folder / name, *layouts[layout][1:]) for name, layout in named.items()}
    made["fasteagle"] = fasteagle_files.random_cascade(folder / "fasteagle")[0]
    made["medusa"] = medusa_files.write(folder / "medusa", medusa_files.heads_state(vocab=0))
    glide = {**glide_files.JSON, "num_hidden_layers": 1}
    made["glide"] = glide_files.write(folder / "glide", glide_files.glide_state(glide), glide)
    return made


def launches_by_width(machine: FakeMachine, target, spec: str) -> dict[int, Launches]:
    """Returns the launches of a drafter's cycle at every captured width."""
    engine = machine.engine(target, spec)
    return {nodes: engine.captured(nodes) for nodes in widths_up_to(engine.drafter.max_nodes)}


def totals(launches: dict[int, Launches]) -> dict[str, dict[str, int]]:
    """Returns the numbers of all widths, as they are recorded."""
    return {str(nodes): each.totals for nodes, each in launches.items()}


def recorded() -> dict[str, dict[str, dict[str, int]]]:
    """Returns the recorded numbers, by drafter and width."""
    return json.loads(RECORDED.read_text())
