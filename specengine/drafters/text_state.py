"""What captured cycles hand on of the texts that a drafter reads into a cache of its own."""

from __future__ import annotations

import torch

from specengine.drafters.backlog import Backlog
from specengine.drafters.engine_views import DraftBatch
from specengine.ops.growth.text_rows import TextRows, text_rows


class TextState:
    """Counts the tokens of every slot that are final in the drafter's cache, and lays out the others.

    first: int32 [slots].  most: tokens that a cycle commits, and the root before them.
    masks: mask tokens behind the root, at most.
    block: tokens of a block; a row sees the target's keys of the blocks before its own.
    """

    def __init__(self, slots: int, most: int, device: torch.device, masks: int = 0, block: int = 1) -> None:
        self._block = block
        self.backlog = Backlog(slots, most)
        self.first = torch.zeros(slots, dtype=torch.int32, device=device)
        starts = torch.arange(slots + 1, dtype=torch.int32, device=device)
        rows = {*range(most, most + masks + 1), self.backlog.room}
        self._starts = {count: starts * count for count in rows}

    def count(self, slot: int, cached: int, waiting: int) -> None:
        """Takes a request with so many cached tokens, and so many behind them."""
        self.first[slot] = cached
        self.backlog.waiting = max(self.backlog.waiting, waiting)

    def committed(self, batch: DraftBatch, table: torch.Tensor, masks: int = 0, mask_token: int = 0) -> TextRows:
        """Returns the tokens of every slot that are not final in the cache, padded to as many rows each.

        They are at most a cycle's, and the root. All but the root count as final then; it is passed again.
        table: int32 [B, P], the slots' pages.
        """
        return self._rows(batch, table, self.backlog.most + masks, 0, masks, mask_token)

    def late(self, batch: DraftBatch, table: torch.Tensor) -> TextRows:
        """Returns these tokens without the root, padded to as many rows as may wait."""
        return self._rows(batch, table, self.backlog.room, 1)

    def _rows(
        self, batch: DraftBatch, table: torch.Tensor, rows: int, unread: int, masks: int = 0, mask_token: int = 0
    ) -> TextRows:
        size = batch.size
        slots = (batch.limits.active, table, self.first[:size], self._starts[rows][: size + 1])
        return text_rows(batch.history, *slots, rows, unread, self._block, masks, mask_token)
