"""What a draft model keeps of its slots between two captured cycles, and the rows of its passes there."""

from __future__ import annotations

import torch

from specengine._C import PAGE_SIZE
from specengine.cache.cache_batch import CacheBatch
from specengine.drafters.backlog import Backlog
from specengine.drafters.engine_views import DraftBatch
from specengine.ops.growth.text_rows import TextRows, text_rows


class DeviceState:
    """Knows the pages of every slot in the draft model's own cache, and how many tokens are final there.

    pages: int32 [slots, P].  first: int32 [slots].
    most: tokens that a cycle commits, and the root before them.  positions: of the longest request, with its drafts.
    """

    def __init__(self, slots: int, most: int, positions: int, device: torch.device) -> None:
        self.backlog = Backlog(slots, most)
        self.pages = torch.zeros(slots, -(-positions // PAGE_SIZE), dtype=torch.int32, device=device)
        self.first = torch.zeros(slots, dtype=torch.int32, device=device)
        starts = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self._starts = {rows: starts * rows for rows in {most, self.backlog.room}}

    def load(self, slot: int, pages: list[int], cached: int, waiting: int) -> None:
        """Takes a request with so many cached tokens, and so many behind them."""
        self.pages[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.first[slot] = cached
        self.backlog.waiting = max(self.backlog.waiting, waiting)

    def committed(self, batch: DraftBatch) -> TextRows:
        """Returns the tokens of every slot that are not final in the cache, padded to as many rows each.

        They are at most a cycle's, and the root. All but the root count as final then; it is passed again.
        """
        return self._rows(batch, self.backlog.most, 0)

    def late(self, batch: DraftBatch) -> TextRows:
        """Returns these tokens without the root, padded to as many rows as may wait."""
        return self._rows(batch, self.backlog.room, 1)

    def place(self, batch: DraftBatch, lengths: torch.Tensor) -> CacheBatch:
        """Returns the slots' places behind so many tokens each."""
        return CacheBatch(self.pages[: batch.size], lengths)

    def _rows(self, batch: DraftBatch, most: int, unread: int) -> TextRows:
        size = batch.size
        slots = (batch.limits.active, self.pages[:size], self.first[:size], self._starts[most][: size + 1])
        return text_rows(batch.history, *slots, most, unread, block=1)
