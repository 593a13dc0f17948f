"""Batches of dialogues that drafters learn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TrainingBatch:
    """B dialogues of up to T tokens, padded at the end with token 0; position ids are 0 .. T - 1.

    tokens: int64 [B, T].  lengths: int64 [B].  wanted: bool [B, T], whether the token after a position is learned
    (false in the padding).  greedy: int64 [B, T], the target's most likely token after each position.
    last: float [B, T, C], the target's hidden states after its final norm.  at_layers: float [B, T, layers, C], the
    residual stream before its hidden_state_layers.
    keys, values: float [layers, B, K, T, D] of the target's kv_layers; keys are rotated to their positions.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    wanted: torch.Tensor
    greedy: torch.Tensor
    last: torch.Tensor
    at_layers: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


def ahead(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Shifts x [B, T, ..] so that row t holds the value of row t + steps; zeros (false) fill the end."""
    tail = x[:, :steps] if steps < x.shape[1] else x
    return torch.cat([x[:, steps:], torch.zeros_like(tail)], 1)
