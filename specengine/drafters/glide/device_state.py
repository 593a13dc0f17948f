"""What GLIDE keeps of its slots between two captured cycles, and the rows of its passes there."""

from __future__ import annotations

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.backlog import Backlog
from specengine.drafters.engine_views import DraftBatch
from specengine.drafters.glide.rows import GlideRows
from specengine.ops.tree_attention import chain_bits


class DeviceState:
    """Counts the tokens of every slot that the drafter has cached.

    first: int32 [slots], tokens whose rows in the drafter's cache are final.
    most: tokens that a cycle commits, and the root before them.
    """

    def __init__(self, slots: int, most: int, device: torch.device) -> None:
        self.first = torch.zeros(slots, dtype=torch.int32, device=device)
        self.backlog = Backlog(slots, most)
        room = self.backlog.room
        self._step = torch.arange(room, dtype=torch.int32, device=device)
        self._bits = chain_bits(torch.tensor([0, room], dtype=torch.int32, device=device), room)

    def committed(self, batch: DraftBatch) -> GlideRows:
        """Returns the tokens of every slot that are not in the drafter's cache, padded to as many rows each.

        They are at most a cycle's, and the root.
        """
        return self._rows(batch, batch.history.length, self.backlog.most)

    def late(self, batch: DraftBatch) -> GlideRows:
        """Returns these tokens without the root, padded to as many rows as may wait."""
        return self._rows(batch, batch.history.length - 1, self.backlog.room)

    def _rows(self, batch: DraftBatch, end: torch.Tensor, most: int) -> GlideRows:
        """Returns the tokens from `first` up to position `end`, int32 [B], padded to `most` rows each."""
        size = batch.size
        length, tokens = batch.history.length, batch.history.tokens
        step, bits = self._step[:most], self._bits[:most, : -(-most // 32)]
        places = (self.first[:size, None] + step).clamp(max=tokens.shape[1] - 1)
        counts = torch.where(self.running(batch), end - self.first[:size], 0)
        real = step < counts[:, None]

        def column(values: torch.Tensor) -> torch.Tensor:
            return torch.where(real, values, -1).view(-1)

        rows = TreeBatch(
            column(tokens.gather(1, places.long())),
            column(step - 1),
            column(step),
            torch.arange(0, size * most + 1, most, dtype=torch.int32, device=length.device),
            torch.where(real[..., None], bits, 0).view(size * most, -1),
            most,
        )
        owner = torch.arange(size * most, device=length.device) // most
        last = rows.row_start[:-1] + (counts - 1).clamp(min=0)
        place = CacheBatch(batch.cache.block_table, self.first[:size])
        return GlideRows(rows, place, length - 1, owner, last.long())

    def drafted(self, batch: DraftBatch, tokens: torch.Tensor, level: int) -> GlideRows:
        """Returns one row of every slot: the token int32 [B] of a level; level 1 holds the root's children."""
        size, length = batch.size, batch.history.length
        number = torch.arange(size + 1, dtype=torch.int32, device=length.device)
        running = self.running(batch)
        depths = torch.where(running, 0, -1).int()
        tokens = torch.where(running, tokens, -1)
        rows = TreeBatch(tokens, torch.full_like(depths, -1), depths, number, running.int()[:, None], 1)
        place = CacheBatch(batch.cache.block_table, length - 1 + level)
        return GlideRows(rows, place, length - 1, number[:-1].long(), number[:-1].long())

    def running(self, batch: DraftBatch) -> torch.Tensor:
        """Returns bool [B]: whether there is a text to read. A prompt of one token is in no cache yet."""
        return (batch.limits.active != 0) & (batch.history.length > 1)

    def advance(self, batch: DraftBatch) -> None:
        """Counts all tokens but the root, which is passed again once the target has cached its keys."""
        first = self.first[: batch.size]
        self.first[: batch.size] = torch.where(self.running(batch), batch.history.length - 1, first)
