"""The rows of a GLIDE pass, and how much of the target's cache each of them sees.

A row sees what it saw in training (the paper's block-wise mask). A row of the text sees the blocks before its own; in
the first block it sees all tokens up to itself. The root and drafted rows see everything that the target has cached.
That lags behind them by one token or more, as the blocks did in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from specengine._C import KVCacheView
from specengine.cache.cache_batch import CacheBatch
from specengine.draft_trees.tree import TreeBatch
from specengine.ops.decoder import Rows


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


class PassRows(NamedTuple):
    """The rows of a pass, where they lie in the drafter's cache, from number first_node on, and what they see."""

    rows: Rows
    place: CacheBatch
    seen: SeenTarget
    first_node: int = 0

    def view(self, k: torch.Tensor, v: torch.Tensor) -> KVCacheView:
        """Returns a layer of the drafter's cache as the rows are written to it."""
        return KVCacheView(k, v, self.place.block_table, self.place.lengths, self.rows.row_start, self.first_node)


@dataclass(frozen=True)
class GlideRows:
    """Tokens of the text as the network reads them; the columns are those of a TreeBatch.

    seen: of the target's cache by each row.  seen_later: by each request's drafted rows, one of a level.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor | None
    seen: SeenTarget
    seen_later: SeenTarget

    @staticmethod
    def of(rows: TreeBatch, place: CacheBatch, verified: Sequence[int], block: int) -> GlideRows:
        """Returns chains of the text of requests on the host.

        place: lengths are their rows in the drafter's cache.  verified: tokens of each in the target's.
        """
        assert place.host is not None and rows.starts is not None  # the host made them
        device, counts, cached = rows.tokens.device, np.diff(rows.starts), np.array(verified, dtype=np.int32)
        owner = np.repeat(np.arange(len(counts)), counts)
        last = visible(place.host, cached, counts, block) - 1

        def seen(table: torch.Tensor, lengths: np.ndarray) -> SeenTarget:
            each = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
            ones = torch.ones(len(lengths), 1, dtype=torch.int32, device=device)
            return SeenTarget(table, torch.from_numpy(lengths).to(device), each, ones)

        table = place.block_table
        by_row = seen(table[torch.from_numpy(owner).to(device)], last)
        return GlideRows(rows.tokens, rows.depths, rows.row_start, rows.ancestors, by_row, seen(table, cached - 1))


def visible(starts: np.ndarray, verified: np.ndarray, counts: np.ndarray, block: int) -> np.ndarray:
    """Returns how many of the target's keys each row of some chains sees, int32 [M].

    starts, verified, counts: int [B], each chain's first position, tokens in the target's cache, and rows.
    block: tokens of a block.
    """
    position = np.concatenate([np.arange(first, first + count) for first, count in zip(starts, counts, strict=True)])
    cached = np.repeat(verified, counts)
    trained = np.where(position < block, position + 1, position // block * block)
    return np.where(position < cached, trained, cached).astype(np.int32)
