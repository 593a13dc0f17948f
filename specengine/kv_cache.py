"""The paged key/value cache: who owns which page, and what a batch shows of it to the ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specengine._C import PAGE_SIZE

if TYPE_CHECKING:
    from specengine.ops import Ops
    from specengine.ops.verify_tree import Accepted


@dataclass
class CacheBatch:
    """The cache as one batch sees it. block_table: int32 [B, max_pages].  lengths: int32 [B], tokens in the prefix."""

    block_table: torch.Tensor
    lengths: torch.Tensor


class KVCache:
    """All layers' keys and values in pages of PAGE_SIZE slots; a sequence owns the pages it was given at admission.

    k, v: [layers, pages, K, PAGE_SIZE, D]. Grows by doubling when sequences need more pages than there are; memory
    is only touched where tokens are written. Nothing is kept of a page that is freed.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (layers, kv_heads, head_dim)
        self.dtype, self.device = dtype, device
        self.k = self._pool(0)
        self.v = self._pool(0)
        self._free: list[int] = []

    def _pool(self, pages: int) -> torch.Tensor:
        layers, kv_heads, head_dim = self._shape
        return torch.empty(layers, pages, kv_heads, PAGE_SIZE, head_dim, dtype=self.dtype, device=self.device)

    def allocate(self, slots: int) -> list[int]:
        """Pages for `slots` tokens. Raises MemoryError when the machine has no room for them."""
        count = -(-slots // PAGE_SIZE)
        if count > len(self._free):
            self._grow(count - len(self._free))
        pages, self._free = self._free[:count], self._free[count:]
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Gives pages back."""
        self._free.extend(pages)

    def _grow(self, missing: int) -> None:
        old = self.k.shape[1]
        new = max(old + missing, 2 * old)
        try:
            k, v = self._pool(new), self._pool(new)
        except RuntimeError as error:
            size = 2 * self.k.element_size() * new * PAGE_SIZE * self._shape[0] * self._shape[1] * self._shape[2]
            raise MemoryError(f"key/value cache: no room for {new} pages ({size / 2**20:.0f} MiB)") from error
        k[:, :old], v[:, :old] = self.k, self.v
        self.k, self.v = k, v
        self._free.extend(range(old, new))

    def compact(self, batch: CacheBatch, accepted: Accepted, ops: Ops) -> None:
        """Keeps the accepted path of every sequence of a batch and advances its length by it."""
        path, count = accepted.path.to(self.device), accepted.path_length.to(self.device)
        ops.compact_kv(self.k, self.v, batch.block_table, batch.lengths, path, count)
        batch.lengths.add_(count)

    def batch(self, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> CacheBatch:
        """The view of sequences that own `pages` and have `lengths` tokens cached."""
        width = max((len(own) for own in pages), default=0)
        table = [[*own, *[0] * (width - len(own))] for own in pages]
        block_table = torch.tensor(table, dtype=torch.int32, device=self.device).reshape(len(pages), width)
        return CacheBatch(block_table, torch.tensor(list(lengths), dtype=torch.int32, device=self.device))
