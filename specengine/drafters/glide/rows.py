"""The rows of a GLIDE pass: where they lie, and how much of the target's cache each of them sees.

A row sees what it saw in training (the paper's block-wise mask). A row of the text sees the blocks before its own; in
the first block it sees all tokens up to itself. The root and drafted rows see everything that the target has cached.
That lags behind them by one token or more, as the blocks did in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine._C import KVCacheView
from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.tree import TreeBatch


@dataclass(frozen=True)
class SeenTarget:
    """The part of the target's cache that each row sees, as operands of tree_attention.

    Every row is a batch member of its own, and its own slot is the last of the target's that it sees.
    """

    block_table: torch.Tensor
    lengths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor

    def view(self, k: torch.Tensor, v: torch.Tensor) -> KVCacheView:
        """Returns a layer of the target's cache as the rows see it."""
        return KVCacheView(k, v, self.block_table, self.lengths, self.row_start, 0)


@dataclass(frozen=True)
class PassRows:
    """Rows as the network reads them.

    tokens, depths: int32 [M].  row_start, ancestors: as those of a TreeBatch; None: chains.  place: lengths are the
    requests' rows in the drafter's cache.  first_node: the number of a request's first row behind them.
    last: int64 [B], each request's last row; None: it has one row.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor | None
    place: CacheBatch
    seen: SeenTarget
    first_node: int = 0
    last: torch.Tensor | None = None

    def view(self, k: torch.Tensor, v: torch.Tensor) -> KVCacheView:
        """Returns a layer of the drafter's cache as the rows are written to it."""
        return KVCacheView(k, v, self.place.block_table, self.place.lengths, self.row_start, self.first_node)


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

    def read(self, block: int) -> PassRows:
        """Returns the rows as the network reads them. block: tokens of a block."""
        rows = self.rows
        seen = SeenTarget(
            block_table=self.place.block_table[self.owner],
            lengths=(self.visible(block) - 1).clamp(min=0),
            row_start=torch.arange(len(self.owner) + 1, dtype=torch.int32, device=self.owner.device),
            ancestors=(rows.depths[:, None] >= 0).int(),
        )
        return PassRows(rows.tokens, rows.depths, rows.row_start, rows.ancestors, self.place, seen, last=self.last)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [M]; of padding, the position of its request's first row."""
        return self.place.lengths[self.owner].long() + self.rows.depths.clamp(min=0)

    def visible(self, block: int) -> torch.Tensor:
        """Returns int32 [M]: how many of the target's keys each row sees."""
        position, verified = self.positions, self.verified[self.owner]
        seen = torch.where(position < block, position + 1, position // block * block)
        return torch.where(position < verified, seen, verified).int()
