"""The first weights of a run that starts from an earlier run or a drafter, perhaps with another vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint, open_draft_checkpoint
from specengine.train.objectives.base import Objective
from specengine.train.run_state import load_state

# Fields of config.json, or of its `dflash_config`, that change the use of the tensors, besides their shapes.
_USE = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps"),
    *("eagle_aux_hidden_state_layer_ids", "parallel", "block_size", "cross_attention"),
    *("target_layer_ids", "mask_token_id", "markov_head_type"),
)


def earlier_drafter(start: Path) -> DraftCheckpoint:
    """Opens the drafter in the folder of a run or of a drafter. Raises ValueError for another folder."""
    try:
        return open_draft_checkpoint(start)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"start: expected the folder of a training run or of a drafter: {error}") from error


def warm_start_weights(start: Path, objective: Objective, target: ModelConfig) -> dict[str, torch.Tensor]:
    """Converts the network state of an earlier run to this run's vocabulary.

    Rows of tokens that both vocabularies have are kept; other rows are the network's own.
    start: the folder of a run, whose newest weights are read, or of a drafter in the layout that this run writes.
    Raises ValueError for another folder, and for another drafter.
    """
    checkpoint = earlier_drafter(start)
    state = load_state(start / "checkpoints", "start")
    if state is None:
        weights, found = _of_drafter(checkpoint, objective)
    else:
        weights = state["network"]
        found = set(weights)
    network = objective.network.state_dict()
    everything = torch.arange(target.vocab_size)
    earlier = checkpoint.vocabulary(target)
    earlier = everything if earlier is None else earlier
    now = everything if objective.target.vocabulary is None else objective.target.vocabulary.cpu()
    row = torch.full((target.vocab_size,), -1).scatter(0, earlier, torch.arange(len(earlier)))[now]
    for name in objective.vocabulary_rows():
        if name in found and len(weights[name]) == len(earlier):
            rows = network[name].cpu().clone()
            rows[row >= 0] = weights[name][row[row >= 0]]
            weights[name] = rows
    return weights


def _of_drafter(checkpoint: DraftCheckpoint, objective: Objective) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Reads the state of the network, and the names of the tensors that the drafter gave."""
    json, _ = objective.export()
    layout = {"d2t", "t2d"}  # the vocabulary, which may differ
    there = set(checkpoint.tensors) - layout
    names = {ours: name for ours, name in objective.translated(checkpoint.json, there).items() if ours not in layout}
    if different := sorted(there ^ set(names.values())):
        here = "has a" if different[0] in there else "has no"
        raise ValueError(f"start: the drafter {checkpoint.source} {here} tensor '{different[0]}', unlike this run's")
    own, theirs = _flat(json), _flat(checkpoint.json)
    for name in _USE:
        if name in own and name in theirs and theirs[name] != own[name]:
            raise ValueError(f"start: {checkpoint.source} has {name} {theirs[name]}, expected {own[name]}")
    return objective.adopted({ours: checkpoint.read(name).float() for ours, name in names.items()}), set(names)


def _flat(json: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the fields of a config.json with those of its group for block drafters, which lie in either place."""
    group = json.get("dflash_config")
    return {**json, **(group if isinstance(group, Mapping) else {})}
