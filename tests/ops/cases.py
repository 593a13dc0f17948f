"""Case tables of the op tests, and what builds trees and caches from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from specengine._C import PAGE_SIZE, KVCacheView
from specengine.ops.tree_attention import gather_slots

NODE_COUNTS = (1, 2, 31, 32, 33, 63, 64, 65, 256)
PREFIX_LENGTHS = (0, 1, 62, 63, 64, 65, 127, 128, 129, 200)
HEADS = ((4, 4), (6, 2), (8, 2), (4, 1))  # (H, K): every head its own, groups of 3 and of 4, one for all
HEAD_DIMS = (8, 20, 64, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.bfloat16)
CACHE_DTYPES = (*DTYPES, torch.float16)

Parents = list[int]


def chain(nodes: int) -> Parents:
    return [node - 1 for node in range(nodes)]


def star(nodes: int) -> Parents:
    return [-1] + [0] * (nodes - 1)


def comb(nodes: int, width: int = 3) -> Parents:
    """Levels of `width` siblings; the first of each level carries the next one."""
    return [-1] + [0 if node <= width else 1 + width * ((node - 1) // width - 1) for node in range(1, nodes)]


def random_tree(nodes: int, seed: int = 0) -> Parents:
    rng = random.Random(seed)
    return [-1] + [rng.randrange(node) for node in range(1, nodes)]


def path_to(parents: Parents, node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def depths_of(trees: Sequence[Parents]) -> torch.Tensor:
    """int32 [M]."""
    return torch.tensor([len(path_to(t, i)) - 1 for t in trees for i in range(len(t))], dtype=torch.int32)


def ancestor_bits(trees: Sequence[Parents], words: int | None = None) -> torch.Tensor:
    """int32 [M, W]: bit j of a row is set where node j is on the row's path."""
    words = words or max((len(tree) + 31) // 32 for tree in trees)
    rows = [path_to(tree, node) for tree in trees for node in range(len(tree))]
    seen = torch.zeros(len(rows), 32 * words, dtype=torch.int64)
    for row, path in enumerate(rows):
        seen[row, path] = 1
    weights = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)])
    return (seen.view(len(rows), words, 32) * weights).sum(dim=2).int()


@dataclass
class Cache:
    """One layer of a paged cache and the batch of trees on it. Every slot that no request uses holds NaN."""

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    row_start: torch.Tensor

    def view(self, first_node: int = 0) -> KVCacheView:
        """The cache as the ops take it."""
        return KVCacheView(self.k, self.v, self.block_table, self.lengths, self.row_start, first_node)

    def rows(self, b: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first slots of request b, [slots, K, D]."""
        return gather_slots(self.k, self.v, self.block_table[b], slots)


def write_slots(cache: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """rows [slots, K, D] become slots 0, 1, ... of the request that owns `pages`."""
    slot = torch.arange(len(rows))
    cache[pages.long()[slot // PAGE_SIZE], :, slot % PAGE_SIZE] = rows.to(cache.dtype)


def make_cache(
    trees: Sequence[Parents],
    lengths: Sequence[int],
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> Cache:
    """Prefix and nodes of every request in shuffled, non-contiguous pages; rows: what they hold (default random)."""
    rng = torch.Generator().manual_seed(seed)
    slots = [length + len(tree) for length, tree in zip(lengths, trees, strict=True)]
    needed = [-(-count // PAGE_SIZE) for count in slots]
    pool = torch.randperm(sum(needed) + 3, generator=rng).int()
    block_table = torch.zeros(len(trees), max(needed, default=0), dtype=torch.int32)
    shape = (len(pool), kv_heads, PAGE_SIZE, dim)
    k, v = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    used = 0
    for b, (count, pages) in enumerate(zip(slots, needed, strict=True)):
        block_table[b, :pages] = pool[used : used + pages]
        used += pages
        for i, cache in enumerate((k, v)):
            content = rows[b][i] if rows else torch.randn(count, kv_heads, dim, generator=rng)
            write_slots(cache, block_table[b], content)
    starts = torch.tensor([0, *(len(tree) for tree in trees)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Cache(k, v, block_table, torch.tensor(list(lengths), dtype=torch.int32), starts)


def view_on(put: Callable[[torch.Tensor], torch.Tensor], view: KVCacheView) -> KVCacheView:
    """The view with every tensor put elsewhere."""
    return KVCacheView(*(put(x) if isinstance(x, torch.Tensor) else x for x in view))


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def later_rows(row_start: torch.Tensor, first_node: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of every tree's nodes from `first_node` on, and the row_start of a pass of these."""
    starts = row_start.tolist()
    rows = [row for begin, end in pairwise(starts) for row in range(begin + first_node, end)]
    return torch.tensor(rows), (row_start - first_node * torch.arange(len(starts))).int()
