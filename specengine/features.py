"""Features: what a drafter may read of the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Features:
    """Hidden states of M rows.

    last: float32 [M, hidden], after the final norm: what the head reads.
    tapped: float32 [M, taps, hidden], the residual stream before the layers asked for; None: none were.
    """

    last: torch.Tensor
    tapped: torch.Tensor | None = None

    def rows(self, index: torch.Tensor | slice) -> Features:
        """Those of some rows."""
        return Features(self.last[index], None if self.tapped is None else self.tapped[index])
