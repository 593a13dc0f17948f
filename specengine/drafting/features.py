"""Features: what a drafter may read of the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine.ops.row_tools import take_rows


@dataclass(frozen=True)
class Features:
    """Hidden states of M rows.

    last: float32 [M, hidden], after the final norm: what the head reads.
    tapped: float32 [M, taps, hidden], the residual stream before the layers asked for; None: none were.
    """

    last: torch.Tensor
    tapped: torch.Tensor | None = None

    def rows(self, picked: Sequence[int]) -> Features:
        """Those of some rows."""
        return Features(take_rows(self.last, picked), None if self.tapped is None else take_rows(self.tapped, picked))
