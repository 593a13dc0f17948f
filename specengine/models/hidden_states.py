"""Features: what a drafter may read of the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from specengine.ops.row_tools import take_rows


class Features:
    """Hidden states of M rows.

    last: float32 [M, hidden], after the final norm: what the head reads.
    tapped: float32 [M, taps, hidden], the residual stream before the layers asked for; None: none were.
    """

    def __init__(self, last: torch.Tensor, tapped: torch.Tensor | None = None) -> None:
        self.last, self.tapped = last, tapped

    def rows(self, picked: Sequence[int]) -> Features:
        """Those of some rows."""
        return _Picked(self, picked)


class _Picked(Features):
    """A drafter reads one of the two, which is copied then."""

    def __init__(self, features: Features, picked: Sequence[int]) -> None:
        self._features, self._picked = features, picked

    @cached_property
    def last(self) -> torch.Tensor:  # type: ignore[override]  # copied when first read
        return take_rows(self._features.last, self._picked)

    @cached_property
    def tapped(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if self._features.tapped is None else take_rows(self._features.tapped, self._picked)
