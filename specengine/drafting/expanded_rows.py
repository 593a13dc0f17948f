"""The rows of growing trees whose children are looked at, as a drafter's pass over them reads them."""

from __future__ import annotations

import numpy as np
import torch

from specengine.drafting.eagle_layers import Rows
from specengine.kv_cache import CacheBatch


class Expanded:
    """The rows of B trees whose children are looked at: each one's last true pair, then level by level.

    place: of the pairs before the last.  own_bits: int32 [R, W], row r has bit r.  running: bool [B], the others' rows
    are padding; None: all are.
    """

    def __init__(self, place: CacheBatch, own_bits: torch.Tensor, running: torch.Tensor | None) -> None:
        self._place, self._own_bits, self._running = place, own_bits, running
        batch, device = len(place.lengths), own_bits.device
        self._order = torch.arange(batch, device=device)[:, None]
        self._depths = torch.zeros(batch, 1, dtype=torch.int32, device=device)
        self._bits = own_bits[:1].expand(batch, 1, -1)
        self._first = 0  # row of the level that was added last

    def add(self, above: torch.Tensor) -> Rows:
        """A level: above is where in the one before each row's parent is, int64 [B, w]."""
        (batch, width), device = above.shape, above.device
        before = self._order.shape[1]
        after = before + width
        made = torch.arange(batch * before, batch * after, device=device).view(batch, width)
        self._order = torch.cat([self._order, made], dim=1)
        self._depths = torch.cat([self._depths, self._depths[:, -1:].expand(-1, width) + 1], dim=1)
        parents = (self._first + above)[..., None].expand(-1, -1, self._bits.shape[2])
        self._bits = torch.cat([self._bits, self._bits.gather(1, parents) | self._own_bits[before:after]], dim=1)
        self._first = before
        rows = torch.arange(batch * after, device=device).view(batch, after)
        depths, bits = self._depths, self._bits
        if self._running is not None:
            depths = torch.where(self._running[:, None], depths, -1)
            bits = torch.where(self._running[:, None, None], bits, 0)
        return Rows(
            depths.flatten(),
            bits.flatten(0, 1),
            torch.arange(0, batch * after + 1, after, dtype=torch.int32, device=device),
            self._place.block_table,
            self._place.lengths,
            self._order.flatten(),
            rows[:, before:].flatten(),
        )


def own_bits(rows: int) -> torch.Tensor:
    """int32 [rows, ceil(rows / 32)]: row r has bit r."""
    bits = np.zeros((rows, -(-rows // 32)), dtype=np.uint32)
    for row in range(rows):
        bits[row, row // 32] = 1 << row % 32
    return torch.from_numpy(bits.view(np.int32))
