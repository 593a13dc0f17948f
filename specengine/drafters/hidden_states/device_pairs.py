"""The pairs that a hidden state drafter has to read, as captured cycles hand them on: static tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.hidden_states.pairs import PairRows, Pairs
from specengine.ops.tree_attention import chain_bits

if TYPE_CHECKING:
    from specengine.engine.device.graph_batch import GraphBatch


class DevicePairs:
    """The pairs that the last cycle made, of as many slots as there are: one per committed token.

    most: pairs of a cycle: levels of the deepest tree and one.  shape: of one position's hidden states.
    counts, first: int32 [slots], how many pairs there are and the number of the first one.
    """

    def __init__(self, slots: int, most: int, shape: tuple[int, ...], device: torch.device) -> None:
        self.hidden_states = torch.zeros(slots, most, *shape, device=device)
        self.counts, self.first = torch.zeros(2, slots, dtype=torch.int32, device=device)
        self._step = torch.arange(most, dtype=torch.int32, device=device)
        self._bits = chain_bits(torch.tensor([0, most], dtype=torch.int32, device=device), most)

    def load(self, pairs: Seq[Pairs]) -> None:
        """Takes what the requests in the first slots have left to read, which is at most what a cycle makes."""
        self.counts.zero_()
        for slot, own in enumerate(pairs):
            self.counts[slot], self.first[slot] = own.count, own.first
            if count := own.count:
                self.hidden_states[slot, :count] = own.take(count)

    def unload(self, pairs: Seq[Pairs]) -> None:
        """Gives back what the first slots have left."""
        kept = zip(pairs, self.counts.tolist(), self.first.tolist(), strict=False)
        for slot, (own, count, first) in enumerate(kept):
            own.first = first
            if count:
                own.add(self.hidden_states[slot, :count].clone())

    def observe(self, slots: GraphBatch, hidden_states: torch.Tensor) -> None:
        """Keeps the features [M, ..] of the committed path's nodes."""
        path, counts = slots.accepted.path[:, : len(self._step)], slots.accepted.path_length
        size, width = path.shape
        rows = (slots.row_start[:size, None] + path.clamp(min=0)).long()
        self.hidden_states[:size, :width] = hidden_states[rows]
        self.counts[:size] = counts
        self.first[:size] = slots.history.length - 1 - counts

    def rows(self, slots: GraphBatch) -> PairRows:
        """All pairs of the slots, padded to as many rows each."""
        size, most = slots.size, len(self._step)
        counts, tokens = self.counts[:size, None], slots.history.tokens
        places = (self.first[:size, None] + 1 + self._step).clamp(max=tokens.shape[1] - 1)
        real = self._step < counts

        def column(values: torch.Tensor) -> torch.Tensor:
            return torch.where(real, values, -1).view(-1)

        rows = TreeBatch(
            column(tokens.gather(1, places.long())),
            column(self._step - 1),
            column(self._step),
            torch.arange(0, size * most + 1, most, dtype=torch.int32, device=counts.device),
            torch.where(real[..., None], self._bits, 0).view(size * most, -1),
            most,
        )
        last = rows.row_start[:-1] + (counts[:, 0] - 1).clamp(min=0)
        return PairRows(rows, self.hidden_states[:size].flatten(0, 1), last.long())
