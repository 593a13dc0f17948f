"""The small tensors of a layer of gated delta rule; its projections are those of Layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import _C

NO_STATES = _C.DeltaStates(None, None, None, None, True)  # of a model without such layers


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

    @property
    def native(self) -> _C.GatedDeltaLayer:
        """The tensors as the core takes them; it borrows them and keeps them alive."""
        return _C.GatedDeltaLayer(self.conv, self.decay, self.dt_bias, self.norm, self.key_heads, self.tiled)
