"""The pairs of hidden state and token that captured cycles hand on, in static tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.engine_views import DraftBatch
from specengine.drafters.hidden_states.pairs import PairRows, Pairs
from specengine.ops.tree_attention import chain_bits


class DevicePairs:
    """Holds the pairs that the last cycle made, one per committed token, of every slot.

    most: pairs of a cycle: the levels of the deepest tree, and one.  shape: of one position's hidden states.
    counts, first: int32 [slots], how many pairs there are and the number of the first one.
    """

    def __init__(self, slots: int, most: int, shape: tuple[int, ...], device: torch.device) -> None:
        self.hidden_states = torch.zeros(slots, most, *shape, device=device)
        self.counts, self.first = torch.zeros(2, slots, dtype=torch.int32, device=device)
        self._step = torch.arange(most, dtype=torch.int32, device=device)
        self._bits = chain_bits(torch.tensor([0, most], dtype=torch.int32, device=device), most)

    def load(self, pairs: Sequence[Pairs]) -> None:
        """Takes the unread pairs of requests into the first slots; they are at most a cycle's."""
        self.counts.zero_()
        for slot, own in enumerate(pairs):
            self.counts[slot] = own.count
            self.first[slot] = own.first
            if count := own.count:
                self.hidden_states[slot, :count] = own.take(count)

    def unload(self, pairs: Sequence[Pairs]) -> None:
        """Gives the unread pairs of the first slots back."""
        slots = zip(pairs, self.counts.tolist(), self.first.tolist(), strict=False)
        for slot, (own, count, first) in enumerate(slots):
            own.first = first
            if count:
                own.add(self.hidden_states[slot, :count].clone())

    def observe(self, batch: DraftBatch, hidden_states: torch.Tensor) -> None:
        """Keeps the hidden states of the committed paths' nodes, out of those of all rows [M, ..]."""
        path = batch.accepted.path[:, : len(self._step)]
        counts = batch.accepted.path_length
        size, width = path.shape
        rows = (batch.row_start[:size, None] + path.clamp(min=0)).long()
        self.hidden_states[:size, :width] = hidden_states[rows]
        self.counts[:size] = counts
        self.first[:size] = batch.history.length - 1 - counts

    def rows(self, batch: DraftBatch) -> PairRows:
        """Returns all pairs of the slots, padded to as many rows each."""
        size, most = batch.size, len(self._step)
        tokens = batch.history.tokens
        counts = self.counts[:size, None]
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
