"""The paged key/value cache: who owns which page, and what a batch shows of it to the ops."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specengine._C import PAGE_SIZE

if TYPE_CHECKING:
    from specengine.ops import Ops
    from specengine.ops.verify_tree import Accepted


IDLE_BYTES = 256 << 20  # a pool larger than this is not kept while nobody uses it


@dataclass
class CacheBatch:
    """The cache as one batch sees it. block_table: int32 [B, max_pages].  lengths: int32 [B], tokens in the prefix."""

    block_table: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        self.host: np.ndarray | None = None  # the memory of lengths: numpy adds in a fraction of a tensor's time

    def advance(self, counts: torch.Tensor) -> None:
        """counts: int32 [B], tokens that are cached now."""
        if self.host is None:
            self.lengths.add_(counts)
            return
        for b, count in enumerate(counts.tolist()):
            self.host[b] += count


def page_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Of a page of keys and values of (layers, key/value heads, head dim)."""
    return 2 * dtype.itemsize * PAGE_SIZE * math.prod(shape)


class PagePool:
    """Keys and values of some layers in pages of PAGE_SIZE slots.  k, v: [layers, pages, K, PAGE_SIZE, D]."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, pages: int
    ) -> None:
        self._shape = (layers, kv_heads, head_dim)
        self.dtype, self.device = dtype, device
        self.k, self.v = self._empty(pages)

    def _empty(self, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        layers, kv_heads, head_dim = self._shape
        shape = (layers, pages, kv_heads, PAGE_SIZE, head_dim)
        return tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for _ in "kv")

    def _copied(self, pages: int, kept: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A pool of `pages` pages with what the `kept` ones hold."""
        k, v = self._empty(pages)
        for page in kept:
            k[:, page], v[:, page] = self.k[:, page], self.v[:, page]
        return k, v

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers, keys and values."""
        return page_bytes(self._shape, self.dtype)


class KVCache(PagePool):
    """All layers' keys and values in pages of PAGE_SIZE slots; a sequence owns the pages it was given at admission.

    A sequence reserves pages for all it may become, so it cannot run out on its way; memory is only used where tokens
    were written, and growing copies no other page. A large pool is let go when its last page is freed. Companions have
    the same pages for the same sequences: a drafter's keys and values lie beside the target's and go with them.
    `free` may be called at any time, everything else by one thread at a time.

    pages: a pool of so many that never moves, as captured graphs need it; None: one that grows with the need.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        pages: int | None = None,
    ) -> None:
        super().__init__(layers, kv_heads, head_dim, dtype, device, pages or 0)
        self.fixed = pages is not None
        self._companions: weakref.WeakSet[PagePool] = weakref.WeakSet()
        self._free: list[int] = [*reversed(range(pages or 0))]
        self._freed: deque[int] = deque()  # on their way to _free
        self._lock = threading.Lock()  # engines that share a fixed pool take turns each for itself

    def companion(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagePool:
        """A pool with this one's pages for other layers: the block tables of the one are those of the other."""
        with self._lock:
            pool = PagePool(layers, kv_heads, head_dim, dtype, self.device, self.k.shape[1])
            self._companions.add(pool)
        return pool

    @property
    def pages_in_use(self) -> int:
        return self.k.shape[1] - len(self._free) - len(self._freed)

    def check_fits(self, slots: int) -> None:
        """Raises ValueError where a sequence of `slots` tokens could never get its pages."""
        room = self.k.shape[1] * PAGE_SIZE
        if self.fixed and slots > room:
            raise ValueError(
                f"prompt: with its answer and a tree it needs room for {slots} tokens, the cache has {room}"
            )

    def has_room(self, slots: int) -> bool:
        """Whether pages for `slots` tokens are free now, or can be made."""
        return not self.fixed or -(-slots // PAGE_SIZE) <= len(self._free) + len(self._freed)

    def allocate(self, slots: int) -> list[int]:
        """Pages for `slots` tokens. Raises MemoryError when there is no room for them."""
        with self._lock:
            return self._allocate(slots)

    def _allocate(self, slots: int) -> list[int]:
        while self._freed:
            self._free.append(self._freed.popleft())
        if not self.fixed and self.pages_in_use == 0 and self.k.nbytes + self.v.nbytes > IDLE_BYTES:
            self._resize(0, ())
            self._free = []
            self._freed.clear()  # nobody owns a page, so nothing can be added meanwhile
        count = -(-slots // PAGE_SIZE)
        if count > len(self._free) and self.fixed:
            raise MemoryError(
                f"key/value cache: {count} pages are needed, {len(self._free)} of {self.k.shape[1]} are free"
            )
        if count > len(self._free):
            self._grow(count - len(self._free))
        # The last freed first: their memory is in use already.
        self._free, pages = self._free[:-count], self._free[-count:]
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Gives pages back; safe at any moment, in any thread (deque.extend of a list is one step)."""
        self._freed.extend(pages)

    def _grow(self, missing: int) -> None:
        old = self.k.shape[1]
        new = max(old + missing, 2 * old)
        free = set(self._free)
        self._resize(new, [page for page in range(old) if page not in free])
        self._free = [*reversed(range(old, new)), *self._free]

    def _resize(self, pages: int, kept: Sequence[int]) -> None:
        """Moves all pools to as many pages, or none of them."""
        pools = [self, *self._companions]
        try:
            resized = [pool._copied(pages, kept) for pool in pools]
        except RuntimeError as error:
            size = pages * sum(pool.page_bytes for pool in pools)
            raise MemoryError(f"key/value cache: no room for {pages} pages ({size / 2**20:.0f} MiB)") from error
        for pool, (k, v) in zip(pools, resized, strict=True):
            pool.k, pool.v = k, v

    def compact(self, batch: CacheBatch, accepted: Accepted, ops: Ops) -> None:
        """Keeps the accepted path of every sequence of a batch and advances its length by it."""
        path, count = (
            t if self.device.type == "cpu" else t.to(self.device) for t in (accepted.path, accepted.path_length)
        )
        ops.compact_kv(self.k, self.v, batch.block_table, batch.lengths, path, count)
        batch.advance(count)

    def batch(self, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> CacheBatch:
        """The view of sequences that own `pages` and have `lengths` tokens cached."""
        width = max((len(own) for own in pages), default=0)
        table = [[*own, *[0] * (width - len(own))] for own in pages]
        # numpy makes small tensors in a third of the time
        block_table = torch.from_numpy(np.array(table, dtype=np.int32).reshape(len(pages), width))
        host = np.array(lengths, dtype=np.int32)
        counts = torch.from_numpy(host)
        if self.device.type != "cpu":
            return CacheBatch(block_table.to(self.device), counts.to(self.device))
        batch = CacheBatch(block_table, counts)
        batch.host = host
        return batch
