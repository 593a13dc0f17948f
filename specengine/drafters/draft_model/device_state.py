"""What a draft model keeps of its slots between two captured cycles: their pages in its own cache."""

from __future__ import annotations

import torch

from specengine._C import PAGE_SIZE
from specengine.cache.cache_batch import CacheBatch
from specengine.drafters.engine_views import DraftBatch
from specengine.drafters.text_state import TextState


class DeviceState(TextState):
    """Knows the pages of every slot, int32 [slots, P].

    most: tokens that a cycle commits, and the root before them.  positions: of the longest request, with its drafts.
    """

    def __init__(self, slots: int, most: int, positions: int, device: torch.device) -> None:
        super().__init__(slots, most, device)
        self.pages = torch.zeros(slots, -(-positions // PAGE_SIZE), dtype=torch.int32, device=device)

    def load(self, slot: int, pages: list[int], cached: int, waiting: int) -> None:
        """Takes a request with so many cached tokens, and so many behind them."""
        self.pages[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.count(slot, cached, waiting)

    def place(self, batch: DraftBatch, lengths: torch.Tensor) -> CacheBatch:
        """Returns the slots' places behind so many tokens each."""
        return CacheBatch(self.pages[: batch.size], lengths)
