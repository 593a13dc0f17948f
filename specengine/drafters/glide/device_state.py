"""What GLIDE keeps of its slots between two captured cycles, and the rows of its passes there."""

from __future__ import annotations

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.drafters.backlog import Backlog
from specengine.drafters.engine_views import DraftBatch
from specengine.drafters.glide.rows import PassRows, SeenTarget
from specengine.ops.growth.level_trees import GrownRows
from specengine.ops.growth.text_rows import TextRows, text_rows


class DeviceState:
    """Counts the tokens of every slot that the drafter has cached.

    first: int32 [slots], tokens whose rows in the drafter's cache are final.
    most: tokens that a cycle commits, and the root before them.  block: tokens of a block, see rows.py.
    """

    def __init__(self, slots: int, most: int, block: int, device: torch.device) -> None:
        self.first = torch.zeros(slots, dtype=torch.int32, device=device)
        self.backlog = Backlog(slots, most)
        self._block = block
        starts = torch.arange(slots * self.backlog.room + 1, dtype=torch.int32, device=device)
        self._each = starts  # of rows that are a request of their own
        self._starts = {rows: (starts[: slots + 1] * rows) for rows in {most, self.backlog.room}}

    def committed(self, batch: DraftBatch) -> TextRows:
        """Returns the tokens of every slot that are not in the drafter's cache, padded to as many rows each.

        They are at most a cycle's, and the root. All but the root count as cached then; it is passed again once the
        target has cached its keys.
        """
        return self._rows(batch, self.backlog.most, 0)

    def late(self, batch: DraftBatch) -> PassRows:
        """Returns these tokens without the root, padded to as many rows as may wait."""
        return self.read(batch, self._rows(batch, self.backlog.room, 1))

    def read(self, batch: DraftBatch, text: TextRows) -> PassRows:
        """Returns tokens of the slots as the network reads them."""
        rows, seen = text.rows, text.seen
        target = SeenTarget(seen.block_table, seen.lengths, self._each[: len(rows.tokens) + 1], seen.ancestors)
        place = CacheBatch(batch.cache.block_table, text.first)
        return PassRows(rows.tokens, rows.depths, rows.row_start, rows.ancestors, place, target, last=text.last)

    def drafted(self, batch: DraftBatch, text: TextRows, grown: GrownRows) -> PassRows:
        """Returns the likeliest node of a level, one row of every slot."""
        table = batch.cache.block_table
        target = SeenTarget(table, text.last_seen, grown.row_start, text.running[:, None])
        place = CacheBatch(table, text.root_positions)
        return PassRows(
            grown.tokens, grown.depths, grown.row_start, grown.ancestors, place, target, first_node=grown.first_node
        )

    def _rows(self, batch: DraftBatch, most: int, unread: int) -> TextRows:
        starts, first = self._starts[most][: batch.size + 1], self.first[: batch.size]
        slots = (batch.limits.active, batch.cache.block_table, first, starts)
        return text_rows(batch.history, *slots, most, unread, self._block)
