"""The paged key/value cache: which request owns which page."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from specengine._C import PAGE_SIZE
from specengine.cache.cache_batch import CacheBatch
from specengine.cache.free_list import FreeList
from specengine.cache.page_pool import PagePool, page_bytes
from specengine.cache.prefix_cache import PrefixCounts, PrefixIndex, Sharing
from specengine.cache.state_pool import StatePool
from specengine.ops import Ops
from specengine.ops.verify_tree import Accepted
from specengine.utils.host_memory import is_host, put_ints
from specengine.utils.reserved_memory import reservable

IDLE_BYTES = 256 << 20  # of unused pages that keep their memory while no request runs


class KVCache(PagePool):
    """Gives requests pages of PAGE_SIZE slots for the keys and values of all layers, at admission.

    A request reserves the pages of its longest possible text, so it never runs out of them. The system gives memory
    only to written pages. Companion pools have the same page numbers for the same requests: they hold a drafter's keys
    and values beside the target's.

    Requests whose texts begin alike share the full pages of that beginning. They write behind shared pages, so nothing
    is copied. Companions have nothing of a text that the drafter did not read; the next request with this text that is
    read fills them. Full pages without holder stay in the prefix cache until they are evicted: in a fixed pool when a
    request needs their room, in an open pool beyond `kept_bytes`, companions included.

    Any thread may call free() at any time; one thread at a time may call the other methods.

    pages: the size of a fixed pool. None, on the CPU: an open pool, of as many pages as address space is reserved
    for. No pool ever moves.

    states: of a hybrid model's other layers; a prefix is then found as far as the state behind it is kept.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        pages: int | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.states = states
        self.fixed, self.kept_bytes = pages is not None, 0
        if pages is None:
            if not is_host(device):
                raise ValueError(f"pages: expected a number on {device}, where a pool takes its memory at once")
            pages = max(1, reservable() // (page_bytes((layers, kv_heads, head_dim), dtype) // 2))
        super().__init__(layers, kv_heads, head_dim, dtype, device, pages)
        self._companions: weakref.WeakSet[PagePool] = weakref.WeakSet()
        self._beside: weakref.WeakSet[KVCache] = weakref.WeakSet()
        self._free = FreeList(self.k.shape[1])
        # Queued by free(), taken back at the next allocation, question for room or count of pages.
        self._returned: deque[tuple[list[int], Sequence[int], Sharing | None, bool]] = deque()
        self._known = PrefixIndex()
        self._promised = 0  # pages of all requests; a shared page counts for each holder
        self._lock = threading.Lock()  # engines that share a fixed pool have locks of their own

    def companion(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagePool:
        """Makes a pool for other layers with the same page numbers, so that both use the same block tables."""
        with self._lock:
            pool = PagePool(layers, kv_heads, head_dim, dtype, self.device, self.k.shape[1])
            self._companions.add(pool)
        return pool

    @property
    def pages_in_use(self) -> int:
        """Pages that requests hold; unused pages of the prefix cache are not among them."""
        with self._lock:
            self._take_back()
            return self.k.shape[1] - len(self._free) - self._known.unused

    @property
    def pages_with_memory(self) -> int:
        """Pages that may take memory: all of a fixed pool; of an open one those in use, kept, or not given back yet."""
        with self._lock:
            return self.k.shape[1] if self.fixed else self._free.with_memory

    @property
    def prefixes(self) -> PrefixCounts:
        """Counters of prefix hits."""
        with self._lock:
            self._take_back()
            return self._known.counts

    def check_fits(self, slots: int) -> None:
        """Raises ValueError where the pool can never hold a request of `slots` tokens."""
        room = self.k.shape[1] * PAGE_SIZE
        if slots > room:
            raise ValueError(
                f"prompt: with its answer and a tree it needs room for {slots} tokens, the cache has {room}"
            )

    def has_room(self, slots: int) -> bool:
        """Returns whether pages for `slots` tokens and a request's state are free now.

        Counts prefix hits as if they were misses: a drafter's own cache of as many pages may share less.
        """
        with self._lock:
            self._take_back()
            if self.states and not self.states.has_room:
                return False
            return -(-slots // PAGE_SIZE) <= self.k.shape[1] - self._promised

    def allocate(self, slots: int) -> list[int]:
        """Returns pages for `slots` tokens. Raises MemoryError where there is no room."""
        return self.allocate_with_prefix(slots, (), None)[0]

    def allocate_with_prefix(
        self, slots: int, text: Sequence[int], sharing: Sharing | None, filled: bool = True
    ) -> tuple[list[int], int]:
        """Returns pages for `slots` tokens that begin with `text`, and how many of its tokens are cached in them.

        The last token of `text` never is.  filled: in the companions too. Raises MemoryError where there is no room.
        """
        with self._lock:
            self._take_back()
            count = -(-slots // PAGE_SIZE)
            shared: list[int] = []
            if sharing is not None:
                shared = self._known.find(sharing, text, filled)
                if self.states:
                    shared = shared[: self.states.reach(shared)]
                self._known.hold(shared)
                self._known.counts.looked_up += len(text)
                self._known.counts.hit += len(shared) * PAGE_SIZE
            try:
                if self.states:
                    self.states.reserve()
                pages = shared + self._allocate(count - len(shared))
            except MemoryError:
                self._known.drop(shared)
                raise
            if self.states:
                self.states.open(pages, len(shared))
            self._promised += count
        return pages, len(shared) * PAGE_SIZE

    def share(self, pages: list[int], text: Sequence[int], sharing: Sharing | None, filled: bool = True) -> None:
        """Adds the full pages of a request's text to the prefix cache; the last token of `text` need not be cached.

        Where the same text was cached before, `pages` gets the earlier pages.  filled: the companions' pages are final
        too; earlier pages without that get it.
        """
        if sharing is not None:
            with self._lock:
                self._add(pages, text, sharing, filled)

    def free(
        self, pages: list[int], text: Sequence[int] = (), sharing: Sharing | None = None, filled: bool = True
    ) -> None:
        """Queues pages; safe at any moment, in any thread.

        The next allocation, has_room() or page counter takes them back and shares their text as share() does.
        """
        self._returned.append((pages, text, sharing, filled))

    def rests_with(self, cache: KVCache) -> None:
        """Makes rest() reach another cache too, a drafter's own."""
        self._beside.add(cache)

    def rest(self) -> None:
        """Gives the memory of unused pages and states back to the system, but for IDLE_BYTES, if no request runs.

        Any thread may call it. A fixed pool keeps its memory.
        """
        with self._lock:
            self._take_back()
            if not self.fixed and not self._promised:
                self._release(self._free.strip(IDLE_BYTES // self._bytes_of_page))
                if self.states:
                    self.states.rest(IDLE_BYTES)
        for cache in self._beside:
            cache.rest()

    def _release(self, pages: list[int]) -> None:
        for pool in self._pools:
            pool.release(pages)

    def _add(self, pages: list[int], text: Sequence[int], sharing: Sharing, filled: bool) -> None:
        for page, known, fills in self._known.add(sharing, text, pages, filled):
            if fills:  # no holder of the known page reads or writes its part in the companions
                for pool in self._companions:
                    pool.copy_page(page, known)
            self._free.give_back([page])

    def _take_back(self) -> None:
        """Takes the queued pages back."""
        known = self._known
        while self._returned:
            pages, text, sharing, filled = self._returned.popleft()
            self._promised -= len(pages)
            if self.states:
                self.states.close(pages)
            if sharing is not None:
                self._add(pages, text, sharing, filled)
            self._free.give_back(known.drop(pages))
        if not self.fixed and known.unused:
            most = self.kept_bytes // self._bytes_of_page
            while known.unused > most:
                self._free.give_back([self._evict()])

    def _evict(self) -> int:
        page = self._known.evict()
        if self.states:
            self.states.forget(page)
        return page

    def _allocate(self, count: int) -> list[int]:
        missing = count - len(self._free)
        if missing > self._known.unused:
            free = len(self._free) + self._known.unused
            raise MemoryError(f"key/value cache: {count} pages are needed, {free} of {self.k.shape[1]} are free")
        self._free.give_back([self._evict() for _ in range(missing)])
        return self._free.take(count)

    @property
    def _bytes_of_page(self) -> int:
        return sum(pool.page_bytes for pool in self._pools)

    @property
    def _pools(self) -> list[PagePool]:
        return [self, *self._companions]

    def compact(self, batch: CacheBatch, accepted: Accepted, ops: Ops) -> None:
        """Moves the accepted path of every request to the end of its prefix; CacheBatch.advance makes it longer."""
        path, count = accepted.path.to(self.device), accepted.path_length.to(self.device)
        ops.compact_kv(self.k, self.v, batch.block_table, batch.lengths, path, count)

    def compact_states(self, batch: CacheBatch, row_start: torch.Tensor, accepted: Accepted, ops: Ops) -> None:
        """Writes the states behind the accepted paths, unless the pass did so.

        row_start: int32 [B + 1], of the pass.
        """
        if self.states is None or batch.states is None:
            return
        path, count = accepted.path.to(self.device), accepted.path_length.to(self.device)
        self.states.replay(batch.states, row_start, path, count, ops)

    def keep_state(self, pages: Sequence[int], cached: int, sharing: Sharing) -> None:
        """Keeps the state of the owner of `pages`, of which `cached` tokens are cached, for the prefix cache.

        Nothing happens unless these end with a page that other requests can find, and with a whole step of `sharing`.
        """
        if self.states and cached and cached % sharing.step == 0:
            with self._lock:
                if pages[cached // PAGE_SIZE - 1] in self._known:
                    self.states.keep(pages, cached // PAGE_SIZE)

    def batch(
        self,
        pages: Sequence[Sequence[int]],
        lengths: Sequence[int],
        adapters: Sequence[int] = (),
        final: bool = True,
        rooted: bool = True,
    ) -> CacheBatch:
        """Makes the view of requests that own `pages` and have `lengths` tokens cached.

        adapters: the number of each request's adapter, -1: none; empty: of no request.  final: the rows of its passes
        are chains that are parts of the texts; compact() accepts nothing then.  rooted: see StateBatch.
        """
        width = max((len(own) for own in pages), default=0)
        table = [[*own, *[0] * (width - len(own))] for own in pages]
        host = np.array(lengths, dtype=np.int32)
        columns = [np.array(table, dtype=np.int32).reshape(len(pages), width), host]
        if any(adapter >= 0 for adapter in adapters):  # otherwise the pass is that of an engine without adapters
            columns.append(np.array(adapters, dtype=np.int32))
        block_table, counts, *chosen = put_ints(columns, self.device)
        states = self.states.batch(pages, final, rooted) if self.states else None
        batch = CacheBatch(block_table, counts, chosen[0] if chosen else None, states)
        batch.host = host
        return batch
