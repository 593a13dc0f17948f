"""Attention of tree nodes over the paged cache.

Shapes: M rows (nodes of all sequences), H query heads, K key/value heads, D head dim, B sequences, W mask words.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specengine import _C
from specengine._C import PAGE_SIZE


def tree_attention(
    q, k_cache, v_cache, block_table, lengths, row_start, ancestors, out, scale: float, window: int
) -> None:
    """out[M, H, D]: every node attends to the whole prefix, its ancestors and itself.

    q: float32 [M, H, D].  k_cache, v_cache: one layer, [pages, K, PAGE_SIZE, D], float32 or bfloat16.
    block_table: int32 [B, max_pages].  lengths: int32 [B].  row_start: int32 [B + 1].
    ancestors: int32 bits [M, W], bit j set where node j is on the row's path; None: every sequence is a chain.
    window: keys at most window - 1 positions back are visible; 0: all.
    Example: the tree 0 -> 1, 0 -> 2, 2 -> 3 has the bits 0b0001, 0b0011, 0b0101, 0b1101.
    A row's bits depend on its own path only, not on the tree, the batch or the number of threads.
    """
    _C.tree_attention(q, k_cache, v_cache, block_table, lengths, row_start, ancestors, out, scale, window)


def tree_attention_reference(
    q, k_cache, v_cache, block_table, lengths, row_start, ancestors, out, scale: float, window: int
) -> None:
    starts = row_start.tolist()
    for b, length in enumerate(lengths.tolist()):
        rows = slice(starts[b], starts[b + 1])
        nodes = starts[b + 1] - starts[b]
        if nodes == 0:
            continue
        keys, values = gather_slots(k_cache, v_cache, block_table[b], length + nodes)
        visible = _visible(nodes, length, None if ancestors is None else ancestors[rows], window, q.device)
        out[rows] = _attend(q[rows], keys, values, visible, scale)


def gather_slots(k_cache, v_cache, pages, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first `slots` slots of one sequence as float32 [slots, K, D]."""
    used = pages[: -(-slots // PAGE_SIZE)].long()

    def gather(cache: torch.Tensor) -> torch.Tensor:
        return cache[used].transpose(1, 2).flatten(0, 1)[:slots].float()

    return gather(k_cache), gather(v_cache)


def _visible(nodes: int, length: int, ancestors, window: int, device) -> torch.Tensor:
    """bool [nodes, length + nodes]: which slots each node sees."""
    index = torch.arange(nodes, device=device)
    if ancestors is None:
        tree = index[:, None] >= index[None, :]
    else:
        tree = (ancestors[:, index // 32] >> (index % 32).int()) & 1 == 1
    visible = torch.cat([torch.ones(nodes, length, dtype=torch.bool, device=device), tree], dim=1)
    if window > 0:
        depth = tree.sum(dim=1) - 1
        position = torch.cat([torch.arange(length, device=device), length + depth])
        visible &= (length + depth)[:, None] - position[None, :] < window
    return visible


def _attend(q, keys, values, visible, scale: float) -> torch.Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(
        q.transpose(0, 1).to(keys.dtype), keys, values, attn_mask=visible, scale=scale
    ).transpose(0, 1)
