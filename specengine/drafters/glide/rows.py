"""The rows of a GLIDE pass: where they lie, and how much of the target's cache each of them sees.

What a row sees is as it was in training (the paper's block-wise mask): a row of the text sees the blocks before its
own; in the first block, where there is none, all up to itself. The root and drafted rows see all that the target has
cached. That lags behind them by one token and more, as the blocks did in training.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.tree import TreeBatch
from specengine.ops.tree_attention import chain_bits

if TYPE_CHECKING:
    from specengine.engine.device.graph_batch import GraphBatch


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
    def of(runs: Seq[Seq[int]], place: CacheBatch, verified: Seq[int], device: torch.device) -> GlideRows:
        """Tokens of every request, from the first one on that is not in the drafter's cache."""
        rows = TreeBatch.chains(runs, device)
        owner = torch.tensor([b for b, run in enumerate(runs) for _ in run], device=device)
        cached = torch.tensor(verified, dtype=torch.int32, device=device)
        return GlideRows(rows, place, cached, owner, rows.row_start[1:].long() - 1)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [M]; of padding: of its request's first row."""
        return self.place.lengths[self.owner].long() + self.rows.depths.clamp(min=0)

    def visible(self, block: int) -> torch.Tensor:
        """int32 [M]: how many of the target's keys each row sees."""
        position, verified = self.positions, self.verified[self.owner]
        seen = torch.where(position < block, position + 1, position // block * block)
        return torch.where(position < verified, seen, verified).int()


class ResidentGlide:
    """What a captured cycle has to know of as many slots as there are.

    first: int32 [slots], tokens that are in the drafter's cache as they stay.
    most: tokens that a cycle commits, and the root before them.
    """

    def __init__(self, slots: int, most: int, device: torch.device) -> None:
        self.first = torch.zeros(slots, dtype=torch.int32, device=device)
        self._step = torch.arange(most, dtype=torch.int32, device=device)
        self._bits = chain_bits(torch.tensor([0, most], dtype=torch.int32, device=device), most)

    def committed(self, slots: GraphBatch) -> GlideRows:
        """The tokens of every slot that are not in the drafter's cache, padded to as many rows each."""
        size, most = slots.size, len(self._step)
        length, tokens = slots.history.length, slots.history.tokens
        places = (self.first[:size, None] + self._step).clamp(max=tokens.shape[1] - 1)
        counts = torch.where(self.running(slots), length - self.first[:size], 0)
        real = self._step < counts[:, None]

        def column(values: torch.Tensor) -> torch.Tensor:
            return torch.where(real, values, -1).view(-1)

        rows = TreeBatch(
            column(tokens.gather(1, places.long())),
            column(self._step - 1),
            column(self._step),
            torch.arange(0, size * most + 1, most, dtype=torch.int32, device=length.device),
            torch.where(real[..., None], self._bits, 0).view(size * most, -1),
            most,
        )
        owner = torch.arange(size * most, device=length.device) // most
        last = rows.row_start[:-1] + (counts - 1).clamp(min=0)
        return GlideRows(rows, CacheBatch(slots.cache.block_table, self.first[:size]), length - 1, owner, last.long())

    def drafted(self, slots: GraphBatch, tokens: torch.Tensor, level: int) -> GlideRows:
        """One row of every slot: the token int32 [B] of a level, the root's children being the first."""
        size, length = slots.size, slots.history.length
        number, running = torch.arange(size + 1, dtype=torch.int32, device=length.device), self.running(slots)
        depths = torch.where(running, 0, -1).int()
        tokens = torch.where(running, tokens, -1)
        rows = TreeBatch(tokens, torch.full_like(depths, -1), depths, number, running.int()[:, None], 1)
        place = CacheBatch(slots.cache.block_table, length - 1 + level)
        return GlideRows(rows, place, length - 1, number[:-1].long(), number[:-1].long())

    def running(self, slots: GraphBatch) -> torch.Tensor:
        """bool [B]: a prompt of one token is in no cache yet, so there is nothing to read."""
        return (slots.limits.active != 0) & (slots.history.length > 1)

    def advance(self, slots: GraphBatch) -> None:
        """The root is passed again once the target has its keys."""
        self.first[: slots.size] = torch.where(self.running(slots), slots.history.length - 1, 0)
