"""The pairs that a feature drafter has to read, as captured cycles hand them on: static tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from specengine.feature_pairs import PairRows, Pairs
from specengine.ops.tree_attention import chain_bits
from specengine.tree import TreeBatch

if TYPE_CHECKING:
    from specengine.resident import Slots


class ResidentPairs:
    """The pairs that the last cycle made, of as many slots as there are: one per committed token.

    most: pairs of a cycle, the depth of the deepest tree and one.  shape: of one position's features.
    """

    def __init__(self, slots: int, most: int, shape: tuple[int, ...], device: torch.device) -> None:
        self.features = torch.zeros(slots, most, *shape, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int32, device=device)
        self._step = torch.arange(most, dtype=torch.int32, device=device)
        self._bits = chain_bits(torch.tensor([0, most], dtype=torch.int32, device=device), most)

    def load(self, pairs: Seq[Pairs]) -> None:
        """Takes what the sequences in the first slots have left to read, which is at most what a cycle makes."""
        self.counts.zero_()
        for slot, own in enumerate(pairs):
            count = len(own.tokens)
            if count:
                self.features[slot, :count] = own.take(count)[1]
                self.counts[slot] = count

    def unload(self, slot: int, pairs: Pairs, tokens: Seq[int]) -> None:
        """Gives back what a slot has left.  tokens: of its sequence, committed to the last."""
        count = int(self.counts[slot])
        pairs.first = len(tokens) - 1 - count
        pairs.add(self.features[slot, :count].clone(), tokens[len(tokens) - count :])

    def observe(self, slots: Slots, features: torch.Tensor) -> None:
        """Keeps the features [M, ..] of the committed path's nodes."""
        path = slots.accepted.path[:, : len(self._step)]
        size, width = path.shape
        rows = (slots.row_start[:size, None] + path.clamp(min=0)).long()
        self.features[:size, :width] = features[rows]
        self.counts[:size] = slots.accepted.path_length

    def rows(self, slots: Slots) -> tuple[PairRows, torch.Tensor]:
        """All pairs of the slots, padded to as many rows each, and the numbers [B] of the first ones."""
        size, most = slots.size, len(self._step)
        counts, history = self.counts[:size, None], slots.history
        starts = history.length - 1 - self.counts[:size]
        places = (starts[:, None] + 1 + self._step).clamp(max=history.tokens.shape[1] - 1)
        real = self._step < counts

        def column(values: torch.Tensor, padding: int = -1) -> torch.Tensor:
            return torch.where(real, values, padding).view(-1)

        rows = TreeBatch(
            column(history.tokens.gather(1, places.long())),
            column((self._step - 1).expand(size, -1)),
            column(self._step.expand(size, -1)),
            torch.arange(0, size * most + 1, most, dtype=torch.int32, device=counts.device),
            torch.where(real[..., None], self._bits, 0).view(size * most, -1),
            most,
        )
        last = rows.row_start[:-1] + (counts[:, 0] - 1).clamp(min=0)
        return PairRows(rows, self.features[:size].flatten(0, 1), last.long()), starts
