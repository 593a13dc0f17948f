"""Reads the small tensors of a layer of gated delta rule."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specengine.ops.gated_delta.matrices import GatedDelta
from specengine.utils.gated_delta_config import GatedDeltaConfig

IN_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # the order of GatedDelta's rows
GATES = (".in_proj_b", ".in_proj_a")  # one row for each value head


def gated_delta(vector: Callable[[str], torch.Tensor], prefix: str, config: GatedDeltaConfig) -> GatedDelta:
    """Reads the tensors that begin with `prefix`. vector: reads one as float32 on the device of the weights."""
    return GatedDelta(
        conv=vector(f"{prefix}.conv1d.weight")[:, 0].T.contiguous(),
        decay=vector(f"{prefix}.decay"),
        dt_bias=vector(f"{prefix}.dt_bias"),
        norm=vector(f"{prefix}.norm.weight"),
        key_heads=config.num_key_heads,
        value_heads=config.num_value_heads,
        tiled=config.tiled,
    )
