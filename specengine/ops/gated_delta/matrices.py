"""The small tensors of a layer of gated delta rule; its projections are those of Layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GatedDelta:
    """What a layer of gated delta rule has beside its projections.

    Rows of the layer's qkv: q [Hk Dk], k [Hk Dk], v [Hv Dv], then z [Hv Dv], b [Hv], a [Hv].
    conv: float32 [4, C], C = 2 Hk Dk + Hv Dv; conv[3] multiplies the row itself.  decay: float32 [Hv], -exp(A_log).
    dt_bias: float32 [Hv].  norm: float32 [Dv].  tiled: see GatedDeltaConfig.
    """

    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    key_heads: int
    value_heads: int
    tiled: bool = False
