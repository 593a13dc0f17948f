"""Cases of kernels that read and write the KV cache: attention, compaction, rotary embedding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from specengine import ops
from specengine._C import PAGE_SIZE, KVCacheView
from specengine.bench.kernels import torch_reference
from specengine.bench.kernels.case import Case, binary_tree, call_each, int_tensor, returning
from specengine.bench.kernels.shapes import Kernels, Shapes


def attention_case(s: Shapes, device: torch.device, kernels: Kernels, nodes: int, prefix: int) -> Case:
    """Returns the case of tree attention of `nodes` rows over `prefix` cached tokens."""
    slots = prefix + nodes
    group = s.heads // s.kv_heads
    tree = binary_tree(nodes, device)
    nbytes = 2 * 2 * slots * s.kv_heads * s.head_dim
    count = s.sets(nbytes)
    pages = -(-slots // PAGE_SIZE)
    shape = (count, pages, s.kv_heads, PAGE_SIZE, s.head_dim)
    k, v = (torch.randn(shape, device=device).to(kernels.cache) for _ in range(2))
    table = torch.randperm(pages, device=device, dtype=torch.int32)[None]
    q = torch.randn(nodes, s.heads, s.head_dim, device=device)
    out = torch.empty(nodes, s.heads, s.head_dim, dtype=kernels.rows, device=device)
    lengths = int_tensor([prefix], device)
    scale = s.head_dim**-0.5
    attention = ops.tree_attention
    arrived = attention.arrival_counters(device)

    def our_attention(cache: KVCacheView) -> torch.Tensor:
        attention.tree_attention(q, cache, tree.ancestors, out, scale, 0, arrived=arrived)
        return out

    views = [KVCacheView(k[i], v[i], table, lengths, tree.row_start, 0) for i in range(count)]
    ours = call_each(our_attention, views)

    # Query heads that share a key head become rows of it, so that PyTorch does not repeat keys.
    folded = q.view(nodes, s.kv_heads, group, -1).permute(1, 2, 0, 3).reshape(1, s.kv_heads, group * nodes, -1)
    folded = folded.to(kernels.torch)
    mask = None
    if nodes > 1:
        assert tree.ancestors is not None  # masked
        node = torch.arange(nodes, device=device)
        seen = tree.ancestors[:, node // 32] >> (node % 32).int() & 1 == 1
        aligned = -(-slots // 16) * 16  # PyTorch copies rows of another length in every call
        mask = torch.zeros(group * nodes, aligned, dtype=kernels.torch, device=device)[:, :slots]
        mask[:, prefix:].masked_fill_(~seen.repeat(group, 1), -math.inf)
    gathered = [attention.gather_slots(k[i], v[i], table[0], slots) for i in range(count)]
    contiguous = [tuple(x.to(kernels.torch).transpose(0, 1).contiguous()[None] for x in pair) for pair in gathered]

    def torch_attention(pair: tuple[torch.Tensor, ...]) -> torch.Tensor:
        keys, values = pair
        result = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        return result.view(s.kv_heads, group, nodes, -1).permute(2, 0, 1, 3).flatten(1, 2)

    torchs = call_each(torch_attention, contiguous)
    return Case("tree_attention", f"N={nodes}, {prefix} tokens", nbytes + q.nbytes + out.nbytes, {"": ours}, torchs)


def compact_case(s: Shapes, device: torch.device, kernels: Kernels) -> Case:
    """Returns the case of moving an accepted path to the front of its pages."""
    nbytes = 2 * 2 * 2 * s.accepted * s.layers * s.kv_heads * s.head_dim  # each row is read and written
    length = PAGE_SIZE // 2
    path = [7 * (i + 1) % PAGE_SIZE for i in range(s.accepted)]
    count = s.sets(nbytes)
    shape = (s.layers, 2 * count, s.kv_heads, PAGE_SIZE, s.head_dim)
    k, v = (torch.randn(shape, device=device).to(kernels.cache) for _ in range(2))
    kept = int_tensor([sorted(path)], device)
    lengths = int_tensor([length], device)
    kept_count = int_tensor([s.accepted], device)
    tables = [int_tensor([[2 * i, 2 * i + 1]], device) for i in range(count)]
    ours = [returning(None, ops.compact_kv.compact_kv, k, v, table, lengths, kept, kept_count) for table in tables]
    flat = (count, s.layers, s.kv_heads, 2 * PAGE_SIZE, s.head_dim)
    source = kept[0].long() + length
    target = torch.arange(s.accepted, device=device) + length

    def copy(keys: torch.Tensor, values: torch.Tensor) -> None:
        for cache in (keys, values):
            cache.index_copy_(2, target, cache.index_select(2, source))

    torchs = call_each(lambda i: copy(k.view(flat)[i], v.view(flat)[i]), range(count))
    return Case("compact_kv", f"{s.layers} layers, {s.accepted} rows", nbytes, {"": ours}, torchs)


def rope_cache_case(s: Shapes, device: torch.device, kernels: Kernels, rows: int) -> Case:
    """Returns the case of rotating queries and keys, and writing keys and values to the cache."""
    width = (s.heads + 2 * s.kv_heads) * s.head_dim
    prefix = s.prefixes[0]
    qkv = torch.randn(rows, width, device=device)
    cos, sin = (torch.rand(prefix + rows, s.head_dim // 2, device=device) for _ in range(2))
    pages = -(-(prefix + rows) // PAGE_SIZE)
    tree = binary_tree(rows, device)
    shape = (pages, s.kv_heads, PAGE_SIZE, s.head_dim)
    k, v = (torch.zeros(shape, dtype=kernels.cache, device=device) for _ in range(2))
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    lengths = int_tensor([prefix], device)
    q = torch.empty(rows, s.heads, s.head_dim, device=device)
    cache = KVCacheView(k, v, table, lengths, tree.row_start, 0)

    def our_rope() -> torch.Tensor:
        ops.layer.rope_cache(qkv, cos, sin, None, None, tree.depths, cache, q, 1e-5)
        return q

    keys, values = (torch.zeros(pages * PAGE_SIZE, s.kv_heads, s.head_dim, dtype=k.dtype, device=device) for _ in "kv")
    positions = prefix + tree.depths.long()
    slots = prefix + torch.arange(rows, device=device)

    def torch_rope() -> torch.Tensor:
        return torch_reference.rope_and_write(qkv.view(rows, -1, s.head_dim), cos, sin, keys, values, positions, slots)

    nbytes = rows * (4 * width + 4 * s.heads * s.head_dim + 2 * 2 * s.kv_heads * s.head_dim + 4 * s.head_dim)
    return Case("rope_cache", f"M={rows}", nbytes, {"": [our_rope]}, [torch_rope])
