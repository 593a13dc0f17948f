"""The nodes of growing trees whose children are looked at, as a drafter's passes read them level by level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specengine.cache.kv_cache import CacheBatch


@dataclass(frozen=True)
class LevelRows:
    """The rows of one level, as those of a TreeBatch."""

    tokens: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor


class Expanded:
    """The nodes of B trees whose children are looked at: each one's last true pair, then level by level.

    place: of the pairs before the last.  own_bits: int32 [R, W], row r has bit r.  running: bool [B], the others' rows
    are padding; None: all are.  count: nodes of each tree so far.
    """

    def __init__(self, place: CacheBatch, own_bits: torch.Tensor, running: torch.Tensor | None) -> None:
        self.place, self._own_bits, self._running = place, own_bits, running
        self.count, self._depth = 1, 0
        self._bits = own_bits[:1].expand(len(place.lengths), 1, -1)  # of the level that was added last

    def add(self, tokens: torch.Tensor, above: torch.Tensor) -> LevelRows:
        """A level: above is where in the one before each row's parent is, int64 [B, w]; tokens: int32 [B, w]."""
        (batch, width), device = above.shape, above.device
        parents = self._bits.gather(1, above[..., None].expand(-1, -1, self._bits.shape[2]))
        self._bits = parents | self._own_bits[self.count : self.count + width]
        self.count, self._depth = self.count + width, self._depth + 1
        depths, bits = torch.full((batch, width), self._depth, dtype=torch.int32, device=device), self._bits
        if self._running is not None:
            depths = torch.where(self._running[:, None], depths, -1)
            bits = torch.where(self._running[:, None, None], bits, 0)
        starts = torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=device)
        return LevelRows(tokens.flatten(), depths.flatten(), starts, bits.flatten(0, 1))


def own_bits(rows: int) -> torch.Tensor:
    """int32 [rows, ceil(rows / 32)]: row r has bit r."""
    bits = np.zeros((rows, -(-rows // 32)), dtype=np.uint32)
    for row in range(rows):
        bits[row, row // 32] = 1 << row % 32
    return torch.from_numpy(bits.view(np.int32))
