"""The rows of a GLIDE pass: where they lie, and how much of the target's cache each of them sees.

A row sees what it saw in training (the paper's block-wise mask). A row of the text sees the blocks before its own; in
the first block it sees all tokens up to itself. The root and drafted rows see everything that the target has cached.
That lags behind them by one token or more, as the blocks did in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.tree import TreeBatch


@dataclass(frozen=True)
class GlideRows:
    """A chain per request.

    place: lengths are its rows in the drafter's cache.  verified: int32 [B], its tokens in the target's.
    owner: int64 [M], each row's request.  last: int64 [B], each request's last row.
    """

    rows: TreeBatch
    place: CacheBatch
    verified: torch.Tensor
    owner: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def of(
        runs: Sequence[Sequence[int]],
        place: CacheBatch,
        verified: Sequence[int],
        device: torch.device,
        masked: bool = False,
    ) -> GlideRows:
        """Lays out each request's tokens, from the first one that is not in the drafter's cache.

        masked: as TreeBatch.chains does.
        """
        rows = TreeBatch.chains(runs, device, masked=masked)
        owner = torch.tensor([b for b, run in enumerate(runs) for _ in run], device=device)
        cached = torch.tensor(verified, dtype=torch.int32, device=device)
        return GlideRows(rows, place, cached, owner, rows.row_start[1:].long() - 1)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [M]; of padding, the position of its request's first row."""
        return self.place.lengths[self.owner].long() + self.rows.depths.clamp(min=0)

    def visible(self, block: int) -> torch.Tensor:
        """Returns int32 [M]: how many of the target's keys each row sees."""
        position, verified = self.positions, self.verified[self.owner]
        seen = torch.where(position < block, position + 1, position // block * block)
        return torch.where(position < verified, seen, verified).int()
