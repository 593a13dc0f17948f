"""Compaction of the cache after acceptance."""

from __future__ import annotations

import torch

from specengine import _C
from specengine._C import PAGE_SIZE


def compact_kv(k_cache, v_cache, block_table, lengths, path, path_length) -> None:
    """Moves the accepted path's rows to the end of the prefix, all layers, keys and values, in one call.

    k_cache, v_cache: [layers, pages, K, PAGE_SIZE, D].  block_table: int32 [B, max_pages].  lengths: int32 [B].
    path: int32 [B, N], ascending node indices.  path_length: int32 [B]. The caller advances lengths by it.
    Example: with 10 tokens cached and path [0, 2, 5], slots 10, 12, 15 become slots 10, 11, 12.
    """
    _C.compact_kv(k_cache, v_cache, block_table, lengths, path, path_length)


def compact_kv_reference(k_cache, v_cache, block_table, lengths, path, path_length) -> None:
    for b, (length, count) in enumerate(zip(lengths.tolist(), path_length.tolist(), strict=True)):
        source = length + path[b, :count].long()
        target = length + torch.arange(count, device=path.device)
        pages = block_table[b].long()
        for cache in (k_cache, v_cache):
            rows = cache[:, pages[source // PAGE_SIZE], :, source % PAGE_SIZE].clone()
            cache[:, pages[target // PAGE_SIZE], :, target % PAGE_SIZE] = rows
