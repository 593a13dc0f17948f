"""The hidden states of the target that drafters read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from specengine.ops.row_tools import take_rows


class HiddenStates:
    """Hidden states of M rows.

    last: float32 [M, hidden], after the final norm; the head reads them.
    at_layers: float32 [M, layers, hidden], the residual stream before the model's hidden_state_layers; None where the
    model has none.
    """

    def __init__(self, last: torch.Tensor, at_layers: torch.Tensor | None = None) -> None:
        self.last = last
        self.at_layers = at_layers

    def rows(self, picked: Sequence[int]) -> HiddenStates:
        """Returns the hidden states of some rows; each tensor is copied on its first use."""
        return _PickedRows(self, picked)


class _PickedRows(HiddenStates):
    """Copies on first use, because a drafter reads only one of the two tensors."""

    def __init__(self, whole: HiddenStates, picked: Sequence[int]) -> None:
        self._whole = whole
        self._picked = picked

    @cached_property
    def last(self) -> torch.Tensor:  # type: ignore[override]  # copied when first read
        return take_rows(self._whole.last, self._picked)

    @cached_property
    def at_layers(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if self._whole.at_layers is None else take_rows(self._whole.at_layers, self._picked)


def eagle3_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the low, middle and high layer of the target whose input EAGLE-3 reads (Li et al. 2025).

    Published checkpoints that name no layers were trained on these.
    """
    return 2, num_layers // 2, num_layers - 3
