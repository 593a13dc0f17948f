"""Attention of tree nodes over the paged cache.

Shapes: M rows (nodes of all requests), H query heads, K key/value heads, D head dim, B requests, W mask words.
"""

from __future__ import annotations

import math

import torch

from specengine import _C
from specengine._C import PAGE_SIZE, KVCacheView
from specengine.ops.layer import rows_of
from specengine.ops.prefill.causal_attention import causal_attention, masked_attention
from specengine.ops.prefill.chains import PromptChains

# Pairs of a row and a key x query heads x head dim. With more, PyTorch's faster products save more than its other calls
# cost, by a model (docs/design/cuda.md, "Prompts over pages"). No GPU has judged it.
LIBRARY_FROM = 1 << 33
COUNTERS = 1 << 15  # of arrival_counters: enough for 1,024 rows of 32 heads


def arrival_counters(device: torch.device) -> torch.Tensor:
    """Returns int32 zeros in which the blocks of one launch at a time count their arrivals.

    Every launch leaves zeros, so launches in sequence share the counters, and a replayed graph finds zeros again.
    They are copied from the host: every stream sees the zeros.
    """
    return torch.zeros(COUNTERS, dtype=torch.int32).to(device)


def tree_attention(
    q,
    cache: KVCacheView,
    ancestors,
    out,
    scale: float,
    window: int,
    strict: bool = False,
    sinks=None,
    arrived=None,
    upcoming=None,
) -> None:
    """out[M, H, D]: every node attends to the whole prefix, its ancestors and itself; on CUDA to all nodes of its bits.

    q: float32 [M, H, D].  cache: one layer, float32, bfloat16 or float16.
    ancestors: int32 bits [M, W], bit j set if node j is on the row's path; None: every request is a chain.
    window: a key is visible at most window - 1 positions back; 0: always.
    Example: the tree 0 -> 1, 0 -> 2, 2 -> 3 has the bits 0b0001, 0b0011, 0b0101, 0b1101.
    strict: a row's bits depend on its own path only, neither on the tree nor on the batch. The CPU and a float32 cache
    are always strict.
    sinks: float32 [H], a score of each head that takes part in the softmax and has no value; None: none.
    On CUDA out may also be bfloat16 or float16, and a row without ancestor bits is padding and becomes zeros. CUDA
    raises ValueError for ancestors None and for a head dim above 256 or not a multiple of 8. Its workspace is allocated
    here.
    arrived: arrival_counters, CUDA only; where they are None or too few, zeros are made here, by a launch more.
    upcoming: the weight that is read next, of any dtype: CUDA brings a part of it to L2 meanwhile. No result changes.
    """
    arguments = q, cache, ancestors, out, scale, window, strict
    floats = _C.tree_attention_workspace(*arguments, None, sinks, None, None)
    workspace, counters = (q.new_empty(floats), q.shape[0] * q.shape[1]) if floats else (None, 0)
    if counters > (0 if arrived is None else len(arrived)):
        arrived = torch.zeros(counters, dtype=torch.int32, device=q.device)
    _C.tree_attention(*arguments, workspace, sinks, arrived, None if upcoming is None else upcoming.view(-1))


def tree_attention_cuda(
    q,
    cache: KVCacheView,
    ancestors,
    out,
    scale: float,
    window: int,
    strict: bool = False,
    sinks=None,
    arrived=None,
    upcoming=None,
    prefetch: bool = True,
    chains: PromptChains | None = None,
) -> None:
    """tree_attention on CUDA, which also takes chains of any length without bits: those of prompts.

    The kernel attends for all of them in one launch, in strict mode, with sinks, over a window, and to chains that are
    no longer than LIBRARY_FROM allows. Others get calls of their own to PyTorch's attention, and so do all chains over
    a float32 cache: there the kernel splits the keys of any number of rows, and its sums would take much memory.
    prefetch: whether `upcoming` is used.
    chains: of all requests, where the host knows them; None: the device is asked, which waits for it.
    """
    upcoming = upcoming if prefetch else None
    if ancestors is not None:
        return tree_attention(q, cache, ancestors, out, scale, window, strict, sinks, arrived, upcoming)
    chains = PromptChains.of(cache.row_start.tolist(), cache.lengths.tolist()) if chains is None else chains
    short, long = chains.divide(cache, _most_of_kernel(q, cache, window, strict, sinks))
    if short is not None:
        rows = short.view(cache), short.ancestors
        tree_attention(q, *rows, out, scale, window, strict, sinks, arrived, upcoming)
    for request, start, end, length in long:
        slots = length + cache.first_node + end - start
        keys, values = gather_slots(cache.k_cache, cache.v_cache, cache.block_table[request], slots)
        out[start:end] = causal_attention(q[start:end], keys, values, scale, window)


def _most_of_kernel(q: torch.Tensor, cache: KVCacheView, window: int, strict: bool, sinks) -> float:
    """Returns the most pairs of a chain, see Chain.pairs, that the kernel attends to."""
    if strict or sinks is not None:
        return math.inf
    if cache.k_cache.dtype == torch.float32:
        return 0
    return math.inf if window > 0 else LIBRARY_FROM / (q.shape[1] * q.shape[2])


def chain_bits(row_start: torch.Tensor, rows: int, first_node: int = 0) -> torch.Tensor:
    """int32 bits [rows, ceil((first_node + rows) / 32)]: a node sees itself and all nodes before it."""
    node = first_node + rows_of(row_start, rows)[1]
    word = torch.arange(-(-(first_node + rows) // 32), device=row_start.device)
    bits = (node[:, None] + 1 - 32 * word).clamp(0, 32)
    return torch.where(bits == 32, -1, (1 << bits.clamp(max=31)) - 1).int()


def tree_attention_reference(
    q,
    cache: KVCacheView,
    ancestors,
    out,
    scale: float,
    window: int,
    sinks=None,
    upcoming=None,
) -> None:
    k_cache, v_cache, block_table, first_node = cache.k_cache, cache.v_cache, cache.block_table, cache.first_node
    starts = cache.row_start.tolist()
    for b, length in enumerate(cache.lengths.tolist()):
        rows, nodes = slice(starts[b], starts[b + 1]), first_node + starts[b + 1] - starts[b]
        if nodes == first_node:
            continue
        keys, values = gather_slots(k_cache, v_cache, block_table[b], length + nodes)
        if ancestors is None:
            out[rows] = causal_attention(q[rows], keys, values, scale, window, sinks)
        else:
            visible = _visible(length, nodes, ancestors[rows], window)
            out[rows] = masked_attention(q[rows], keys, values, visible, scale, sinks)


def gather_slots(k_cache, v_cache, pages, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first `slots` slots of one request: [slots, K, D]."""
    used = pages[: -(-slots // PAGE_SIZE)].long()
    k, v = (cache[used].transpose(1, 2).flatten(0, 1)[:slots] for cache in (k_cache, v_cache))
    return k, v


def _visible(length: int, nodes: int, ancestors: torch.Tensor, window: int) -> torch.Tensor:
    """bool [rows, length + nodes]: which slots each row sees; the rows are the last of the nodes."""
    rows, device = len(ancestors), ancestors.device
    index = torch.arange(nodes, device=device)
    tree = (ancestors[:, index // 32] >> (index % 32).int()) & 1 == 1
    visible = torch.cat([torch.ones(rows, length, dtype=torch.bool, device=device), tree], dim=1)
    if window > 0:
        prefix = torch.arange(length, device=device).expand(rows, -1)
        position = torch.cat([prefix, length + tree.cumsum(dim=1) - 1], dim=1)  # right on each row's path
        visible &= position[:, -1:] - position < window
    return visible
