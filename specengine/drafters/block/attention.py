"""Attention of a block's slots: to all context, and to the slots that the mask of the layer shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from specengine._C import KVCacheView
from specengine.cache.cache_batch import CacheBatch
from specengine.ops.layerwise.decoder import LayerOps
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

    heads, kv_heads: of the drafter.  Slots that see the whole block attend as if each were the last one. On a device
    their bits say so; the CPU shows a node no later one, and all slots are heads of one row there.
    """

    def __init__(self, ops: LayerOps, heads: int, kv_heads: int, head_dim: int, size: int) -> None:
        self.ops, self.size = ops, size
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self._chains: dict[tuple[int, bool], Rows] = {}  # by requests; captured graphs hold on to these
        self._lone: dict[int, Rows] = {}

    def at(self, place: CacheBatch) -> AttentionAt:
        """Returns the attention of one pass.  place: lengths are those of the context."""
        return AttentionAt(self, place)

    def rows(self, batch: int, device: torch.device, causal: bool) -> Rows:
        """Returns the rows of blocks: chains, or rows that each see the whole block, on a device alone."""
        key = (batch, causal)
        if key not in self._chains:
            starts = torch.arange(0, batch * self.size + 1, self.size, dtype=torch.int32, device=device)
            bits = None
            if not is_host(device):
                bits = chain_bits(starts, batch * self.size)[:, : -(-self.size // 32)].contiguous()
                if not causal:
                    bits = bits[self.size - 1].expand_as(bits).contiguous()
            self._chains[key] = Rows(starts, bits)
        return self._chains[key]

    def lone(self, batch: int, device: torch.device) -> Rows:
        """Returns one row of each request."""
        if batch not in self._lone:
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
            bits = None if is_host(device) else torch.ones(batch, 1, dtype=torch.int32, device=device)
            self._lone[batch] = Rows(starts, bits)
        return self._lone[batch]


class Rows(NamedTuple):
    """start: int32 [B + 1].  ancestors: int32 [M, W] bits; None on the host."""

    start: torch.Tensor
    ancestors: torch.Tensor | None


class AttentionAt:
    """The attention of one pass, layer by layer."""

    def __init__(self, attention: BlockAttention, place: CacheBatch) -> None:
        self._of, self._place = attention, place
        self._ends: dict[int, torch.Tensor] = {}  # by the last slot that is seen

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns [B size, H D] of queries [B size, H, D], in a dtype.

        keys, values: of one layer.
        """
        a = self._of
        views = {mask.seen_from(slot, a.size) for slot in range(a.size)}
        (last, window), *_ = views
        if mask.causal and all(other == window for _, other in views):
            out = self._as_blocks(q, keys, values, window, dtype, True)
        elif len(views) == 1 and not is_host(q.device):
            out = self._as_blocks(q, keys, values, window, dtype, False)
        elif len(views) == 1 and a.size * a.heads // a.kv_heads <= MOST_HEADS:
            out = self._as_heads(q, keys, values, last, window, dtype)
        else:
            out = self._slot_by_slot(q, keys, values, mask, dtype)
        return out.view(len(q), -1)

    def _as_blocks(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int, dtype: torch.dtype, causal: bool
    ) -> torch.Tensor:
        """causal: whether a slot sees itself and those before; otherwise the whole block, on a device alone."""
        rows = self._of.rows(len(self._place.lengths), q.device, causal)
        view = KVCacheView(keys, values, self._place.block_table, self._place.lengths, rows.start, 0)
        return self._attended(q, view, rows, window, dtype)

    def _as_heads(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, last: int, window: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Makes all slots of a request heads of one row, so that they read the context together."""
        a, batch = self._of, len(self._place.lengths)
        group = a.heads // a.kv_heads
        shape = (batch, a.size, a.kv_heads, group, a.head_dim)
        rows = _swapped(q.view(shape)).view(batch, -1, a.head_dim)
        out = self._last_rows(rows, keys, values, last, window, dtype)
        return _swapped(out.view(batch, a.kv_heads, a.size, group, a.head_dim)).view(q.shape)

    def _slot_by_slot(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask, dtype: torch.dtype
    ) -> torch.Tensor:
        size = self._of.size
        slots = q.view(-1, size, *q.shape[1:])
        out = torch.empty_like(slots, dtype=dtype)
        for slot in range(size):
            last, window = mask.seen_from(slot, size)
            out[:, slot] = self._last_rows(slots[:, slot].contiguous(), keys, values, last, window, dtype)
        return out

    def _last_rows(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, last: int, window: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Attends with one row of each request, which sees the context and the block up to slot `last`."""
        rows = self._of.lone(len(q), q.device)
        if last not in self._ends:
            self._ends[last] = self._place.lengths + last
        view = KVCacheView(keys, values, self._place.block_table, self._ends[last], rows.start, 0)
        return self._attended(q, view, rows, window, dtype)

    def _attended(
        self, q: torch.Tensor, view: KVCacheView, rows: Rows, window: int, dtype: torch.dtype
    ) -> torch.Tensor:
        out = torch.empty_like(q, dtype=dtype)
        self._of.ops.tree_attention(q, view, rows.ancestors, out, self._of.head_dim**-0.5, window)
        return out


def _swapped(rows: torch.Tensor) -> torch.Tensor:
    """Returns [B, K, S, ..] of [B, S, K, ..] on the CPU, in memory of its own."""
    return torch.from_numpy(np.ascontiguousarray(rows.numpy().swapaxes(1, 2)))
