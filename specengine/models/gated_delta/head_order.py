"""The order of value heads: grouped by key head in folders; in GGUF files tiled, where key heads vary fastest."""

from __future__ import annotations

import torch

from specengine.utils.gated_delta_config import GatedDeltaConfig


def tiled_order(part: str, delta: GatedDeltaConfig) -> torch.Tensor | None:
    """Returns the grouped rows of a tensor in tiled order, int64 [rows]; of `out_proj`, whose values it reads, columns.

    part: its name in a layer, less `linear_attn.` and `.weight`. None for a tensor without value heads.
    """
    if part in ("in_proj_qkv", "conv1d"):
        return _order(delta, 2 * delta.key_size, delta.value_head_dim)
    if part in ("in_proj_z", "out_proj"):
        return _order(delta, 0, delta.value_head_dim)
    return _order(delta, 0, 1) if part in ("in_proj_b", "in_proj_a", "decay", "dt_bias") else None


def _order(delta: GatedDeltaConfig, first: int, size: int) -> torch.Tensor:
    """Orders heads of `size` rows behind `first` rows without heads."""
    heads = torch.arange(delta.num_value_heads).view(delta.num_key_heads, -1).T.reshape(-1, 1)
    return torch.cat([torch.arange(first), (first + heads * size + torch.arange(size)).flatten()])
