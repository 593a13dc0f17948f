"""The tokens that a block drafter's head knows, and their logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.ops.layerwise.decoder import LayerOps
from specengine.ops.weight import Projection


@dataclass(frozen=True)
class Vocabulary:
    """The logits of the drafter's tokens. tokens: int32 [Vd], the target's; None: they are the same.

    multiplier: of the logits.  softcap: c tanh(x / c) follows; 0: it does not.
    """

    head: Projection
    ops: LayerOps
    tokens: torch.Tensor | None = None
    multiplier: float = 1.0
    softcap: float = 0.0

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 [M, Vd] of outputs [M, hidden], before multiplier and softcap."""
        return self.ops.linear(rows.contiguous(), self.head)

    def of_levels(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the same of outputs [levels, B, hidden], as [levels, B, Vd]."""
        return self.logits(slots.flatten(0, 1)).view(*slots.shape[:2], -1)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies multiplier and softcap."""
        if self.multiplier != 1:
            logits = logits * self.multiplier
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the target's ids of the drafter's tokens."""
        return tokens if self.tokens is None else self.tokens[tokens.long()]
