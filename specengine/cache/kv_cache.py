"""The paged key/value cache: who owns which page, and what a batch shows of it to the ops."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specengine._C import PAGE_SIZE
from specengine.cache.page_pool import PagePool
from specengine.cache.prefix_cache import PrefixCounts, PrefixIndex, Sharing

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


class KVCache(PagePool):
    """All layers' keys and values in pages of PAGE_SIZE slots; a request has the pages it was given at admission.

    A request reserves pages for all it may become, so it cannot run out on its way; memory is only used where tokens
    were written, and growing copies no other page. Companions have the same pages for the same requests: a drafter's
    keys and values lie beside the target's and go with them.

    Requests whose texts begin alike share the whole pages of that beginning. Whoever shares a page writes behind it,
    so none is ever copied for that. What nobody uses any more can be found until it is evicted: in a fixed pool where
    its room is needed, else where it is more than `kept_bytes`, companions included.

    `free` may be called at any time, everything else by one thread at a time.

    pages: a pool of so many that never moves, as captured graphs need it; None: one that grows with the need, and is
    let go when it is large and nobody uses it.
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
        self.fixed, self.kept_bytes = pages is not None, 0
        self._companions: weakref.WeakSet[PagePool] = weakref.WeakSet()
        self._free: list[int] = [*reversed(range(pages or 0))]
        self._freed: deque[tuple[list[int], Sequence[int], Sharing | None]] = deque()  # on their way to _free
        self._known = PrefixIndex()
        self._promised = 0  # pages of all requests; one that several share counts for each of them
        self._lock = threading.Lock()  # engines that share a fixed pool take turns each for itself

    def companion(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagePool:
        """A pool with this one's pages for other layers: the block tables of the one are those of the other."""
        with self._lock:
            pool = PagePool(layers, kv_heads, head_dim, dtype, self.device, self.k.shape[1])
            self._companions.add(pool)
        return pool

    @property
    def pages_in_use(self) -> int:
        """Of requests; what is kept for others is not among them."""
        with self._lock:
            self._settle()
            return self.k.shape[1] - len(self._free) - self._known.unused

    @property
    def prefixes(self) -> PrefixCounts:
        """How often prompts began like earlier texts."""
        with self._lock:
            self._settle()
            return self._known.counts

    def check_fits(self, slots: int) -> None:
        """Raises ValueError where a request of `slots` tokens could never get its pages."""
        room = self.k.shape[1] * PAGE_SIZE
        if self.fixed and slots > room:
            raise ValueError(
                f"prompt: with its answer and a tree it needs room for {slots} tokens, the cache has {room}"
            )

    def has_room(self, slots: int) -> bool:
        """Whether pages for `slots` tokens are free now, or can be made.

        What could be shared is counted as if it were not: a drafter's cache of its own, with as many pages as this one,
        may share less and must have room, too.
        """
        with self._lock:
            self._settle()
            return not self.fixed or -(-slots // PAGE_SIZE) <= self.k.shape[1] - self._promised

    def allocate(self, slots: int) -> list[int]:
        """Pages for `slots` tokens. Raises MemoryError when there is no room for them."""
        return self.begin(slots, (), None)[0]

    def begin(self, slots: int, text: Sequence[int], sharing: Sharing | None) -> tuple[list[int], int]:
        """Pages for `slots` tokens that begin with `text`, and how many tokens of that are cached in them already.

        At least the last one of `text` is not. Raises MemoryError when there is no room.
        """
        with self._lock:
            self._settle()
            count = -(-slots // PAGE_SIZE)
            self._let_go(count)
            shared: list[int] = []
            if sharing is not None:
                shared = self._known.find(sharing, text)
                self._known.hold(shared)
                self._known.counts.looked_up += len(text)
                self._known.counts.hit += len(shared) * PAGE_SIZE
            try:
                pages = shared + self._allocate(count - len(shared))
            except MemoryError:
                self._known.drop(shared)
                raise
            self._promised += count
        return pages, len(shared) * PAGE_SIZE

    def share(self, pages: list[int], text: Sequence[int], sharing: Sharing | None) -> None:
        """Lets others find whole pages of a text that a request has cached; the last token of `text` need not be.

        Where the same text is cached twice, the request has the earlier one's pages from now on.
        """
        if sharing is not None:
            with self._lock:
                self._free += self._known.add(sharing, text, pages)

    def free(self, pages: list[int], text: Sequence[int] = (), sharing: Sharing | None = None) -> None:
        """Gives pages back, whose text others may find as after share(); safe at any moment, in any thread."""
        self._freed.append((pages, text, sharing))

    def _settle(self) -> None:
        """Takes in what was freed."""
        known = self._known
        while self._freed:
            pages, text, sharing = self._freed.popleft()
            self._promised -= len(pages)
            if sharing is not None:
                self._free += known.add(sharing, text, pages)
            self._free += known.drop(pages)
        if not self.fixed and known.unused:
            most = self.kept_bytes // sum(pool.page_bytes for pool in self._pools)
            while known.unused > most:
                self._free.append(known.evict())

    def _allocate(self, count: int) -> list[int]:
        missing = count - len(self._free)
        if missing > 0 and not self.fixed:
            self._grow(missing)
        elif missing > self._known.unused:
            free = len(self._free) + self._known.unused
            raise MemoryError(f"key/value cache: {count} pages are needed, {free} of {self.k.shape[1]} are free")
        else:
            self._free += [self._known.evict() for _ in range(missing)]
        # The last freed first: their memory is in use already.
        left = len(self._free) - count
        self._free, pages = self._free[:left], self._free[left:]
        return pages

    def _grow(self, missing: int) -> None:
        old = self.k.shape[1]
        new, free = max(old + missing, 2 * old), set(self._free)
        self._resize(new, {page: page for page in range(old) if page not in free})
        self._free = [*reversed(range(old, new)), *self._free]

    def _let_go(self, count: int) -> None:
        """Leaves of a large pool that nobody uses what is kept for others, and room for `count` pages."""
        kept = self._known.pages
        new = len(kept) + count
        large = self.k.nbytes + self.v.nbytes > IDLE_BYTES and self.k.shape[1] > 2 * new
        if large and not self._promised and not self.fixed:
            numbers = {page: number for number, page in enumerate(kept)}
            self._resize(new, numbers)
            self._known.renumber(numbers)
            self._free = [*reversed(range(len(kept), new))]

    def _resize(self, pages: int, kept: Mapping[int, int]) -> None:
        """Moves all pools to as many pages, or none of them."""
        pools = self._pools
        try:
            resized = [pool.copied(pages, kept) for pool in pools]
        except RuntimeError as error:
            size = pages * sum(pool.page_bytes for pool in pools)
            raise MemoryError(f"key/value cache: no room for {pages} pages ({size / 2**20:.0f} MiB)") from error
        for pool, (k, v) in zip(pools, resized, strict=True):
            pool.k, pool.v = k, v

    @property
    def _pools(self) -> list[PagePool]:
        return [self, *self._companions]

    def compact(self, batch: CacheBatch, accepted: Accepted, ops: Ops) -> None:
        """Keeps the accepted path of every request of a batch and advances its length by it."""
        path, count = (
            t if self.device.type == "cpu" else t.to(self.device) for t in (accepted.path, accepted.path_length)
        )
        ops.compact_kv(self.k, self.v, batch.block_table, batch.lengths, path, count)
        batch.advance(count)

    def batch(self, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> CacheBatch:
        """The view of requests that own `pages` and have `lengths` tokens cached."""
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
