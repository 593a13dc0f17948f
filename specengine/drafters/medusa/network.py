"""Medusa's heads as a network: each reads the same hidden state, and none knows what the others drafted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from specengine.drafters.growth import Steps
from specengine.drafters.hidden_states.last_state import OpenedStates
from specengine.drafters.medusa.heads import Head
from specengine.ops import Ops
from specengine.ops.growth.add_delta import add_delta, rounded
from specengine.ops.growth.growing_trees import Logits
from specengine.ops.row_tools import stack_rows
from specengine.ops.weight import Projection


class MedusaNetwork:
    """Runs heads, one per level."""

    def __init__(self, heads: Sequence[Head], ops: Ops) -> None:
        self.heads, self._linear, self._on_device = heads, ops.linear, ops.on_device
        self._dtype_for = ops.layer.dtype_for

    @property
    def projections(self) -> list[Projection]:
        """Every linear layer."""
        return [product for head in self.heads for product in (*head.blocks, head.logits)]

    def draft(self, opened: OpenedStates, levels: int) -> Steps:
        """Reads the hidden states with the heads of the first levels."""
        yield Logits(self._logits(opened.hidden_states, self.heads[:levels]), levels=levels, by_request=False)

    def _logits(self, rows: torch.Tensor, heads: Sequence[Head]) -> torch.Tensor:
        """Returns float32 [levels * B, Vd] of hidden states [B, hidden]."""
        entering = {dtype: rounded(rows, dtype) for dtype in {self._dtype_for(head.blocks[0]) for head in heads}}
        parts = (self._after_blocks(rows, entering[self._dtype_for(head.blocks[0])], head) for head in heads)
        if not self._on_device:
            return stack_rows([self._linear(read, head.logits) for read, head in zip(parts, heads, strict=True)])
        out = torch.empty(len(heads), len(rows), heads[0].logits.rows, device=rows.device)
        for read, head, own in zip(parts, heads, out, strict=True):
            self._linear(read, head.logits, out=own)
        return out.flatten(0, 1)

    def _after_blocks(self, x: torch.Tensor, read: torch.Tensor, head: Head) -> torch.Tensor:
        """Returns what a head's last product reads. read: x as the first one does."""
        for block, reader in pairwise((*head.blocks, head.logits)):
            delta = self._linear(read, block)
            if self._on_device:
                total = torch.empty_like(x)
                read, x = add_delta(x, delta, self._dtype_for(reader), total=total, silu=True), total
            else:
                x = read = x + functional.silu(delta)
        return read
