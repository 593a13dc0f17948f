"""The network of a one-pass block drafter: its backbone gives all slots' outputs at once, its head reads them."""

from __future__ import annotations

import torch

from specengine.drafters.block.backbone import Backbone
from specengine.drafters.block.head import BlockHead
from specengine.drafters.block.settings import BlockSettings
from specengine.drafters.growth import Opened, Steps
from specengine.drafters.hidden_states.pairs import PairRows
from specengine.ops.row_tools import FixedRows
from specengine.ops.weight import Projection


class BlockNetwork:
    """Caches the pairs, runs a block of mask tokens after them, and lets the head draft on the slots' outputs."""

    def __init__(self, settings: BlockSettings, backbone: Backbone, head: BlockHead) -> None:
        self.settings, self.backbone, self.head = settings, backbone, head
        self._fixed = FixedRows()
        # A head that reads the path reads slots beside it, exactly.
        self._dtype = torch.float32 if head.reads_path else head.ops.dtype_for(head.vocabulary.head)

    @property
    def projections(self) -> list[Projection]:
        """Its linear layers."""
        return [*self.backbone.projections, *self.head.projections]

    def draft(self, opened: Opened, levels: int) -> Steps:
        self.backbone.cache_pairs(PairRows(opened.rows, opened.pairs, opened.last), opened.place, opened.pool)
        blocks = self.backbone.block_tokens(len(opened.known))  # the reader has set the roots
        outputs, first = self.backbone.outputs(blocks, opened.root_place, opened.pool), self.settings.first_slot
        batch, size, hidden = outputs.shape
        by_levels = [b * size + first + level for level in range(levels) for b in range(batch)]
        slots = self._fixed.take(outputs.flatten(0, 1), by_levels, self._dtype)
        yield from self.head.draft(slots.view(levels, batch, hidden), opened.roots.view(-1))
