"""Attention of a block's slots: to all context, and to the slots that the mask of the layer shows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specengine._C import KVCacheView
from specengine.cache.cache_batch import CacheBatch
from specengine.ops.layerwise_decoder import LayerOps
from specengine.ops.tree_attention import chain_bits
from specengine.utils.host_memory import is_host

MOST_HEADS = 256  # query heads per key/value head of one call, csrc/ops/tree_attention.h


@dataclass(frozen=True)
class BlockMask:
    """What a slot of a layer sees.

    causal: of the block, itself and the slots before it; otherwise the whole block.
    window: positions that it sees at most, back from itself and with itself. from_anchor: positions before the block
    that all its slots see at most; the window hides no slot. 0: no limit.
    """

    causal: bool = False
    window: int = 0
    from_anchor: bool = False

    def seen_from(self, slot: int, size: int) -> tuple[int, int]:
        """Returns the last slot that a slot sees, and the window as counted from there; 0: none."""
        last = slot if self.causal else size - 1
        return last, self.window and self.window + last + (1 if self.from_anchor else -slot)


class BlockAttention:
    """Attends for blocks of `size` slots, whose keys and values are in the cache already.

    heads, kv_heads: of the drafter.  The ops show a node its ancestors only, never a later node. A slot that sees the
    whole block therefore attends as if it were the last one.
    """

    def __init__(self, ops: LayerOps, heads: int, kv_heads: int, head_dim: int, size: int) -> None:
        self._ops, self._size = ops, size
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: CacheBatch, mask: BlockMask
    ) -> torch.Tensor:
        """Returns float32 [B size, H D] of queries [B size, H, D].

        keys, values: of one layer.  place: lengths are those of the context.
        """
        size = self._size
        views = {mask.seen_from(slot, size) for slot in range(size)}
        if mask.causal and len({window for _, window in views}) == 1:
            out = self._chains(q, keys, values, place, mask.window)
        elif len(views) == 1 and size * self._heads // self._kv_heads <= MOST_HEADS:
            ((last, window),) = views
            out = self._as_heads(q, keys, values, place, last, window)
        else:
            out = self._slot_by_slot(q, keys, values, place, mask)
        return out.view(len(q), -1)

    def _chains(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: CacheBatch, window: int
    ) -> torch.Tensor:
        starts = torch.arange(0, len(q) + 1, self._size, dtype=torch.int32, device=q.device)
        view = KVCacheView(keys, values, place.block_table, place.lengths, starts, 0)
        bits = None if is_host(q.device) else chain_bits(starts, len(q))[:, : -(-self._size // 32)].contiguous()
        out = torch.empty_like(q)
        self._ops.tree_attention(q, view, bits, out, self._head_dim**-0.5, window)
        return out

    def _as_heads(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: CacheBatch, last: int, window: int
    ) -> torch.Tensor:
        """Makes all slots of a request heads of one row, so that they read the context together."""
        batch, group = len(place.lengths), self._heads // self._kv_heads
        shape = (batch, self._size, self._kv_heads, group, self._head_dim)
        rows = _swapped(q.view(shape)).view(batch, -1, self._head_dim)
        out = self._last_rows(rows, keys, values, place, last, window)
        return _swapped(out.view(batch, self._kv_heads, self._size, group, self._head_dim)).view(q.shape)

    def _slot_by_slot(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: CacheBatch, mask: BlockMask
    ) -> torch.Tensor:
        slots = q.view(-1, self._size, *q.shape[1:])
        out = torch.empty_like(slots)
        for slot in range(self._size):
            view = mask.seen_from(slot, self._size)
            out[:, slot] = self._last_rows(slots[:, slot].contiguous(), keys, values, place, *view)
        return out

    def _last_rows(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: CacheBatch, last: int, window: int
    ) -> torch.Tensor:
        """Attends with one row of each request, which sees the context and the block up to slot `last`."""
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        view = KVCacheView(keys, values, place.block_table, place.lengths + last, starts, 0)
        bits = None if is_host(q.device) else torch.ones(len(q), 1, dtype=torch.int32, device=q.device)
        out = torch.empty_like(q)
        self._ops.tree_attention(q, view, bits, out, self._head_dim**-0.5, window)
        return out


def _swapped(rows: torch.Tensor) -> torch.Tensor:
    """Returns [B, K, S, ..] of [B, S, K, ..], in memory of its own."""
    if is_host(rows.device):
        return torch.from_numpy(np.ascontiguousarray(rows.numpy().swapaxes(1, 2)))
    return rows.transpose(1, 2).contiguous()
