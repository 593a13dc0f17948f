"""HiddenStates: what a drafter may read of the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from specengine.ops.row_tools import take_rows


class HiddenStates:
    """Hidden states of M rows.

    last: float32 [M, hidden], after the final norm: what the head reads.
    at_layers: float32 [M, hidden_state_layers, hidden], the residual stream before the layers asked for; None: none were.
    """

    def __init__(self, last: torch.Tensor, at_layers: torch.Tensor | None = None) -> None:
        self.last, self.at_layers = last, at_layers

    def rows(self, picked: Sequence[int]) -> HiddenStates:
        """Those of some rows."""
        return _Picked(self, picked)


class _Picked(HiddenStates):
    """A drafter reads one of the two, which is copied then."""

    def __init__(self, hidden_states: HiddenStates, picked: Sequence[int]) -> None:
        self._features, self._picked = hidden_states, picked

    @cached_property
    def last(self) -> torch.Tensor:  # type: ignore[override]  # copied when first read
        return take_rows(self._features.last, self._picked)

    @cached_property
    def at_layers(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if self._features.at_layers is None else take_rows(self._features.at_layers, self._picked)
