"""The chains of a pass over prompts, as tree attention on CUDA reads them: made once a pass, for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from specengine._C import MAX_NODES, KVCacheView
from specengine.utils.host_memory import put_ints

_CHAIN_BITS = np.packbits(np.tri(MAX_NODES, dtype=bool), axis=1, bitorder="little").view("<i4")  # [MAX_NODES, W]


class Chain(NamedTuple):
    """A request's rows on the host: the first one, the one behind the last, and the cached tokens before them."""

    request: int
    start: int
    end: int
    length: int

    def pairs(self, first_node: int) -> float:
        """Returns the pairs of a row and a key that it sees.  first_node: of a KVCacheView."""
        rows = self.end - self.start
        return rows * (self.length + first_node + (rows + 1) / 2)


class ShortChains(NamedTuple):
    """Chains of at most MAX_NODES nodes: the ancestor bits of all rows, and what else a KVCacheView has but keys."""

    ancestors: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    row_start: torch.Tensor

    def view(self, cache: KVCacheView) -> KVCacheView:
        """Returns a layer of a cache as the chains see it."""
        return KVCacheView(cache.k_cache, cache.v_cache, self.block_table, self.lengths, self.row_start, 0)


class Division(NamedTuple):
    """Who attends for which chains.

    short: of the kernel; None: of no chain.  long: of the library, whose rows have no prefix in `short`: the kernel's
    results for them are not used.
    """

    short: ShortChains | None
    long: Sequence[Chain]


class PromptChains:
    """Holds the chains of all requests of a pass, of any length, where the host knows them."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        """chains: of all rows, in their order."""
        self.chains = tuple(chains)
        self._divisions: dict[float, Division] = {}

    @staticmethod
    def of(starts: Sequence[int], lengths: Sequence[int]) -> PromptChains:
        """Makes them of a TreeBatch's starts and each request's cached tokens."""
        return PromptChains([Chain(b, *ends, lengths[b]) for b, ends in enumerate(pairwise(starts))])

    def divide(self, cache: KVCacheView, most: float) -> Division:
        """Returns the kernel's chains, of at most `most` pairs of a row and a key that it sees, and the library's.

        cache: any layer, because all layers of a pass share the rest of it. The kernel's long chains are several short
        ones, each with those before it in its prefix: a layer writes the keys of all rows first.
        """
        if most not in self._divisions:
            chains = [chain for chain in self.chains if chain.end > chain.start]
            long = [chain for chain in chains if chain.pairs(cache.first_node) > most]
            short = self._short(cache, {*long}) if len(long) < len(chains) else None
            self._divisions[most] = Division(short, long)
        return self._divisions[most]

    def _short(self, cache: KVCacheView, long: set[Chain]) -> ShortChains:
        requests, starts, lengths, bits = list[int](), list[int](), list[int](), list[np.ndarray]()
        for chain in self.chains:
            for first in range(chain.start, chain.end, MAX_NODES):
                requests.append(chain.request)
                starts.append(first)
                lengths.append(0 if chain in long else chain.length + cache.first_node + first - chain.start)
                bits.append(_CHAIN_BITS[: min(MAX_NODES, chain.end - first)])
        words = -(-max(map(len, bits)) // 32)
        columns = [np.array(each, dtype=np.int32) for each in ([*starts, self.chains[-1].end], lengths, requests)]
        ancestors = np.ascontiguousarray(np.concatenate(bits)[:, :words])
        row_start, prefixes, owners, masks = put_ints([*columns, ancestors], cache.row_start.device)
        return ShortChains(masks, cache.block_table.index_select(0, owners), prefixes, row_start)
