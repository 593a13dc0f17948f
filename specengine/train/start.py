"""Where a run goes on from: the weights of an earlier one, whose vocabulary may have been another."""

from __future__ import annotations

from pathlib import Path

import torch

from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.train.objective import Objective
from specengine.train.run_state import load_state


def starting_weights(run: Path, objective: Objective, target: ModelConfig) -> dict[str, torch.Tensor]:
    """The state of the network after an earlier run, as this one's vocabulary wants it: rows of tokens that were in the
    earlier one, too, are kept, others are the network's own.

    run: the folder of a run. Raises ValueError where that holds none.
    """
    state = load_state(run / "checkpoints", "start")
    if state is None:
        raise ValueError(f"start: expected the folder of a training run, got {run}, which has no checkpoint")
    weights, network = state["network"], objective.network.state_dict()
    everything = torch.arange(target.vocab_size)
    earlier = open_draft_checkpoint(run).vocabulary(target)
    earlier = everything if earlier is None else earlier
    now = everything if objective.frozen.vocabulary is None else objective.frozen.vocabulary.cpu()
    row = torch.full((target.vocab_size,), -1).scatter(0, earlier, torch.arange(len(earlier)))[now]
    for name in objective.vocabulary_rows():
        if name in weights and len(weights[name]) == len(earlier):
            rows = network[name].cpu().clone()
            rows[row >= 0] = weights[name][row[row >= 0]]
            weights[name] = rows
    return weights
