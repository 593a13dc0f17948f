"""The expanded nodes of growing trees, as the rows of a drafter's passes, level by level."""

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
    """Lays out the expanded nodes of B trees: each request's last true pair, then level by level.

    place: of the pairs before the last.  own_bits: int32 [R, W], row r has bit r.
    count: nodes of each tree so far.
    """

    def __init__(self, place: CacheBatch, own_bits: torch.Tensor) -> None:
        self.place = place
        self.count = 1
        self._depth = 0
        self._own_bits = own_bits
        self._bits = own_bits[:1].expand(len(place.lengths), 1, -1)  # of the level that was added last

    def add(self, tokens: torch.Tensor, above: torch.Tensor) -> LevelRows:
        """Adds a level; returns its rows.

        tokens: int32 [B, w].  above: int64 [B, w], the place of each row's parent in the level before.
        """
        (batch, width), device = above.shape, above.device
        parents = self._bits.gather(1, above[..., None].expand(-1, -1, self._bits.shape[2]))
        self._bits = parents | self._own_bits[self.count : self.count + width]
        self.count += width
        self._depth += 1
        depths = torch.full((batch, width), self._depth, dtype=torch.int32, device=device)
        starts = torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=device)
        return LevelRows(tokens.flatten(), depths.flatten(), starts, self._bits.flatten(0, 1))


def own_bits(rows: int) -> torch.Tensor:
    """Returns int32 [rows, ceil(rows / 32)]: row r has bit r."""
    bits = np.zeros((rows, -(-rows // 32)), dtype=np.uint32)
    for row in range(rows):
        bits[row, row // 32] = 1 << row % 32
    return torch.from_numpy(bits.view(np.int32))
