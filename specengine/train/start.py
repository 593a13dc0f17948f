"""Where a run goes on from: an earlier run's weights or a drafter's, whose vocabulary may have been another."""

from __future__ import annotations

from pathlib import Path

import torch

from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint, open_draft_checkpoint
from specengine.train.objectives.base import Objective
from specengine.train.run_state import load_state

# What config.json says of how tensors are used, beside their shapes.
_USE = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps"),
    *("eagle_aux_hidden_state_layer_ids", "parallel", "block_size", "cross_attention"),
)


def starting_weights(start: Path, objective: Objective, target: ModelConfig) -> dict[str, torch.Tensor]:
    """The state of the network after an earlier run, as this one's vocabulary wants it: rows of tokens that were in the
    earlier one, too, are kept, others are the network's own.

    start: the folder of a run, whose newest weights count, or of a drafter in the layout that this run will write.
    Raises ValueError where it is neither, or of another drafter.
    """
    try:
        checkpoint = open_draft_checkpoint(start)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"start: expected the folder of a training run or of a drafter: {error}") from error
    state = load_state(start / "checkpoints", "start")
    weights = _of_drafter(checkpoint, objective) if state is None else state["network"]
    network = objective.network.state_dict()
    everything = torch.arange(target.vocab_size)
    earlier = checkpoint.vocabulary(target)
    earlier = everything if earlier is None else earlier
    now = everything if objective.frozen.vocabulary is None else objective.frozen.vocabulary.cpu()
    row = torch.full((target.vocab_size,), -1).scatter(0, earlier, torch.arange(len(earlier)))[now]
    for name in objective.vocabulary_rows():
        if name in weights and len(weights[name]) == len(earlier):
            rows = network[name].cpu().clone()
            rows[row >= 0] = weights[name][row[row >= 0]]
            weights[name] = rows
    return weights


def _of_drafter(checkpoint: DraftCheckpoint, objective: Objective) -> dict[str, torch.Tensor]:
    json, tensors = objective.export()
    layout = {"d2t", "t2d"}  # of its own vocabulary, whatever this run's is
    if different := sorted((set(checkpoint.tensors) ^ set(tensors)) - layout):
        here = "has no" if different[0] in tensors else "has a"
        raise ValueError(f"start: the drafter {checkpoint.source} {here} tensor '{different[0]}', unlike this run's")
    for name in _USE:
        if name in json and checkpoint.json.get(name) != json[name]:
            raise ValueError(
                f"start: {checkpoint.source} has {name} {checkpoint.json.get(name)}, expected {json[name]}"
            )
    return objective.adopted({name: checkpoint.read(name).float() for name in set(tensors) - layout})
