"""The pairs of hidden state and token that captured cycles hand on, in static tensors on the device.

A cycle with a draft reads all of them and leaves those that it commits. A cycle of width 1 only adds its pair. Where
many wait, the drafter reads all but the last between two cycles; see Backlog.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.drafters.backlog import Backlog
from specengine.drafters.engine_views import DraftBatch
from specengine.drafters.hidden_states.pairs import PairRows, Pairs
from specengine.ops.growth.pairs import Masks, keep_pairs, pair_rows
from specengine.ops.row_tools import FixedRows


class WaitingPairs(NamedTuple):
    """The pairs of every slot, and where they and what follows lie in the drafter's cache.

    roots: int32 [B, 1], the last committed tokens.  counts: int32 [B], 0: there is no pair.
    place: of the first pair.  last: of the last one.  next: behind it.
    """

    pairs: PairRows
    roots: torch.Tensor
    counts: torch.Tensor
    place: CacheBatch
    last: CacheBatch
    next: CacheBatch


class DevicePairs:
    """Holds the unread pairs of every slot, one per committed token.

    most: pairs of a cycle: the levels of the deepest tree, and one.  like: hidden states of one position.
    masks: rows after them, at most.
    counts, first: int32 [slots], how many pairs there are and the number of the first one.
    """

    def __init__(self, slots: int, most: int, like: torch.Tensor, masks: int = 0) -> None:
        device = like.device
        self.backlog = Backlog(slots, most)
        room = self.backlog.room
        self.hidden_states = torch.zeros(slots, room, *like.shape, dtype=like.dtype, device=device)
        self.counts, self.first = torch.zeros(2, slots, dtype=torch.int32, device=device)
        self._slots = torch.arange(slots, device=device)
        self._fixed = FixedRows()
        self._starts = {
            rows: torch.arange(0, slots * rows + 1, rows, dtype=torch.int32, device=device)
            for rows in {*range(most, most + masks + 1), room}
        }

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
            pairs.add(self.hidden_states[slot, :count].to(torch.float32, copy=True))

    def clear(self, slot: int) -> None:
        """Forgets the pairs of a slot."""
        self.counts[slot] = 0

    def observe(self, batch: DraftBatch, hidden_states: torch.Tensor) -> None:
        """Keeps the hidden states of the committed paths' nodes, out of those of all rows [M, ..]."""
        rows, kept = hidden_states.flatten(1), self.hidden_states.flatten(2)
        places = (kept, self.counts, self.first)
        keep_pairs(rows, batch.row_start, batch.accepted, batch.history, *places, add=batch.nodes == 1)

    def rows(self, batch: DraftBatch, blocks: torch.Tensor | None = None, masks: Masks | None = None) -> WaitingPairs:
        """Returns all pairs of the slots, which are at most a cycle's, and masks, padded to as many rows each.

        blocks: int32 [B, S], whose first column becomes the roots.
        """
        return self._rows(batch, self.backlog.most, unread=0, blocks=blocks, masks=masks)

    def late_rows(self, batch: DraftBatch) -> PairRows:
        """Returns all pairs but the last of every slot, padded to as many rows as have room."""
        return self._rows(batch, self.backlog.room, unread=1).pairs

    def forget_late(self, batch: DraftBatch) -> None:
        """Keeps the last pair of every slot alone."""
        size = batch.size
        read = (self.counts[:size] - 1).clamp(min=0)
        self.hidden_states[:size, 0] = self.hidden_states[self._slots[:size], read.long()]
        self.first[:size] += read
        self.counts[:size] -= read

    def _rows(
        self,
        batch: DraftBatch,
        most: int,
        unread: int,
        blocks: torch.Tensor | None = None,
        masks: Masks | None = None,
    ) -> WaitingPairs:
        """Returns the pairs of every slot but the `unread` last ones, padded to `most` rows each."""
        size, table = batch.size, batch.cache.block_table
        first, rows = self.first[:size], most + (masks.count if masks else 0)
        starts, room = self._starts[rows][: size + 1], self.backlog.room
        laid = pair_rows(batch.history, self.counts[:size], first, starts, rows, unread, blocks, masks)
        kept = self.hidden_states[:size].flatten(0, 1)
        if size == 1 or most == room:
            kept = kept[: size * most]
        else:
            kept = self._fixed.take(kept, [slot * room + pair for slot in range(size) for pair in range(most)])
        pairs = PairRows(laid.rows, kept, laid.last, laid.above)
        places = (CacheBatch(table, lengths) for lengths in (first, laid.last_pairs, laid.next_pairs))
        return WaitingPairs(pairs, laid.roots, self.counts[:size], *places)
