"""The pairs of hidden state and token that captured cycles hand on, in static tensors on the device.

A cycle with a draft reads all of them and leaves those that it commits. A cycle of width 1 only adds its pair. Where
many wait, the drafter reads all but the last between two cycles; see Backlog.
"""

from __future__ import annotations

import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.backlog import Backlog
from specengine.drafters.engine_views import DraftBatch
from specengine.drafters.hidden_states.pairs import PairRows, Pairs
from specengine.ops.tree_attention import chain_bits


class DevicePairs:
    """Holds the unread pairs of every slot, one per committed token.

    most: pairs of a cycle: the levels of the deepest tree, and one.  shape: of one position's hidden states.
    counts, first: int32 [slots], how many pairs there are and the number of the first one.
    """

    def __init__(self, slots: int, most: int, shape: tuple[int, ...], device: torch.device) -> None:
        self.backlog = Backlog(slots, most)
        room = self.backlog.room
        self.hidden_states = torch.zeros(slots, room, *shape, device=device)
        self.counts, self.first = torch.zeros(2, slots, dtype=torch.int32, device=device)
        self._slots = torch.arange(slots, device=device)
        self._step = torch.arange(room, dtype=torch.int32, device=device)
        self._bits = chain_bits(torch.tensor([0, room], dtype=torch.int32, device=device), room)

    def load(self, slot: int, pairs: Pairs) -> None:
        """Takes the unread pairs of a request into a slot; they came from one, or a prompt left one."""
        count = pairs.count
        self.backlog.waiting = max(self.backlog.waiting, count)
        self.counts[slot] = count
        self.first[slot] = pairs.first
        if count:
            self.hidden_states[slot, :count] = pairs.take(count)
            pairs.first -= count  # they have not been read yet

    def unload(self, slot: int, pairs: Pairs) -> None:
        """Gives the unread pairs of a slot back."""
        pairs.first = int(self.first[slot])
        if count := int(self.counts[slot]):
            pairs.add(self.hidden_states[slot, :count].clone())

    def clear(self, slot: int) -> None:
        """Forgets the pairs of a slot."""
        self.counts[slot] = 0

    def observe(self, batch: DraftBatch, hidden_states: torch.Tensor) -> None:
        """Keeps the hidden states of the committed paths' nodes, out of those of all rows [M, ..]."""
        counts = batch.accepted.path_length
        if batch.nodes == 1:
            place = self.counts[: batch.size]
            self.hidden_states[self._slots[: batch.size], place.long()] = hidden_states
            place += counts
            return
        path = batch.accepted.path[:, : self.backlog.most]
        size, width = path.shape
        rows = (batch.row_start[:size, None] + path.clamp(min=0)).long()
        self.hidden_states[:size, :width] = hidden_states[rows]
        self.counts[:size] = counts
        self.first[:size] = batch.history.length - 1 - counts

    def rows(self, batch: DraftBatch) -> PairRows:
        """Returns all pairs of the slots, which are at most a cycle's, padded to as many rows each."""
        return self._rows(batch, self.counts[: batch.size], self.backlog.most)

    def late_rows(self, batch: DraftBatch) -> PairRows:
        """Returns all pairs but the last of every slot, padded to as many rows as have room."""
        return self._rows(batch, self.counts[: batch.size] - 1, self.backlog.room)

    def forget_late(self, batch: DraftBatch) -> None:
        """Keeps the last pair of every slot alone."""
        size = batch.size
        read = (self.counts[:size] - 1).clamp(min=0)
        self.hidden_states[:size, 0] = self.hidden_states[self._slots[:size], read.long()]
        self.first[:size] += read
        self.counts[:size] -= read

    def _rows(self, batch: DraftBatch, pairs: torch.Tensor, most: int) -> PairRows:
        """Returns the first pairs, int32 [B], of every slot, padded to `most` rows each."""
        size = batch.size
        tokens = batch.history.tokens
        step, counts = self._step[:most], pairs[:, None]
        places = (self.first[:size, None] + 1 + step).clamp(max=tokens.shape[1] - 1)
        real = step < counts
        bits = self._bits[:most, : -(-most // 32)]

        def column(values: torch.Tensor) -> torch.Tensor:
            return torch.where(real, values, -1).view(-1)

        rows = TreeBatch(
            column(tokens.gather(1, places.long())),
            column(step - 1),
            column(step),
            torch.arange(0, size * most + 1, most, dtype=torch.int32, device=counts.device),
            torch.where(real[..., None], bits, 0).view(size * most, -1),
            most,
        )
        last = rows.row_start[:-1] + (counts[:, 0] - 1).clamp(min=0)
        return PairRows(rows, self.hidden_states[:size, :most].flatten(0, 1), last.long())
