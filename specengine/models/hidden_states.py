"""The hidden states of the target that drafters read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from specengine.ops.row_tools import take_rows
from specengine.utils.host_memory import is_host


class HiddenStates:
    """Hidden states of M rows.

    normed: [M, hidden], after the final norm, in the dtype in which the head reads rows.
    at_layers: float32 [M, layers, hidden], the residual stream before the model's hidden_state_layers; None where the
    model has none.
    experts: int32 [layers], how many experts each layer read in the pass; 0 where it has none, and without counts. None
    for a dense model, and on CUDA, where the host would wait for the counts.
    """

    def __init__(
        self, normed: torch.Tensor, at_layers: torch.Tensor | None = None, experts: torch.Tensor | None = None
    ) -> None:
        self.normed = normed
        self.at_layers = at_layers
        self.experts = experts

    def __len__(self) -> int:
        return len(self.normed)

    @property
    def last(self) -> torch.Tensor:
        """The normed rows in float32, as drafters read them. Not kept: a replayed graph writes the others again."""
        return self.normed.float()

    @property
    def experts_per_layer(self) -> float | None:
        """How many experts a layer read in the pass, the mean of the layers that counted; None where none did."""
        counts = [] if self.experts is None else [count for count in self.experts.tolist() if count]
        return sum(counts) / len(counts) if counts else None

    def split(self, counts: Sequence[int]) -> list[HiddenStates]:
        """Returns the hidden states of the first rows, those behind them, and so on, uncopied.  counts: of the rows."""
        normed = self.normed.split([*counts])
        layers = [None] * len(normed) if self.at_layers is None else self.at_layers.split([*counts])
        return [HiddenStates(own, at, self.experts) for own, at in zip(normed, layers, strict=True)]

    def rows(self, picked: Sequence[int]) -> HiddenStates:
        """Returns the hidden states of some rows; each tensor is taken on first use, uncopied where it can be."""
        return _PickedRows(self, picked)

    @property
    def origin(self) -> tuple[HiddenStates, Sequence[int] | None]:
        """The hidden states of a whole pass, and which of its rows these are; None: all."""
        return self, None


class _PickedRows(HiddenStates):
    """Takes rows on first use, because a drafter reads only one of the two tensors."""

    def __init__(self, whole: HiddenStates, picked: Sequence[int]) -> None:
        self._whole = whole
        self._picked = picked
        self.experts = whole.experts

    def rows(self, picked: Sequence[int]) -> HiddenStates:
        return _PickedRows(self._whole, [self._picked[row] for row in picked])

    @property
    def origin(self) -> tuple[HiddenStates, Sequence[int] | None]:
        return self._whole, self._picked

    def __len__(self) -> int:
        return len(self._picked)

    @cached_property
    def normed(self) -> torch.Tensor:  # type: ignore[override]  # taken when first read
        return self._take(self._whole.normed)

    @cached_property
    def at_layers(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if self._whole.at_layers is None else self._take(self._whole.at_layers)

    def _take(self, rows: torch.Tensor) -> torch.Tensor:
        first, count = self._picked[0] if self._picked else 0, len(self._picked)
        # A pass on the CPU writes tensors of its own; on CUDA the next replay of a graph writes the same ones again.
        if is_host(rows.device) and list(self._picked) == [*range(first, first + count)]:
            return rows[first : first + count]
        return take_rows(rows, self._picked)


def eagle3_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the low, middle and high layer of the target whose input EAGLE-3 reads (Li et al. 2025).

    Published checkpoints that name no layers were trained on these.
    """
    return 2, num_layers // 2, num_layers - 3
