"""The paged key/value cache: which request owns which page."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specengine._C import PAGE_SIZE
from specengine.cache.cache_batch import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.cache.prefix_cache import PrefixCounts, PrefixIndex, Sharing
from specengine.cache.state_pool import StatePool
from specengine.ops import Ops
from specengine.ops.verify_tree import Accepted
from specengine.utils.host_memory import put_ints

IDLE_BYTES = 256 << 20  # a larger pool shrinks while no request uses it


class KVCache(PagePool):
    """Gives requests pages of PAGE_SIZE slots for the keys and values of all layers, at admission.

    A request reserves the pages of its longest possible text, so it never runs out of them. The system gives memory
    only to written pages. Companion pools have the same page numbers for the same requests: they hold a drafter's keys
    and values beside the target's.

    Requests whose texts begin alike share the full pages of that beginning. They write behind shared pages, so nothing
    is copied. Companions have nothing of a text that the drafter did not read; the next request with this text that is
    read fills them. Full pages without holder stay in the prefix cache until they are evicted: in a fixed pool when a
    request needs their room, in a growing pool beyond `kept_bytes`, companions included.

    Any thread may call free() at any time; one thread at a time may call the other methods.

    pages: the size of a fixed pool, which never moves, for captured graphs. None: a pool that grows with the need. It
    shrinks when it is large and unused, and was mostly unused before.

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
        super().__init__(layers, kv_heads, head_dim, dtype, device, pages or 0)
        self.states = states
        self.fixed, self.kept_bytes = pages is not None, 0
        self._companions: weakref.WeakSet[PagePool] = weakref.WeakSet()
        self._free_pages: list[int] = [*reversed(range(pages or 0))]
        # Queued by free(), taken back at the next allocation, question for room or count of pages.
        self._returned: deque[tuple[list[int], Sequence[int], Sharing | None, bool]] = deque()
        self._known = PrefixIndex()
        self._promised = 0  # pages of all requests; a shared page counts for each holder
        self._peak = 0  # the most pages in use since the pool was last unused
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
            return self.k.shape[1] - len(self._free_pages) - self._known.unused

    @property
    def prefixes(self) -> PrefixCounts:
        """Counters of prefix hits."""
        with self._lock:
            self._take_back()
            return self._known.counts

    def check_fits(self, slots: int) -> None:
        """Raises ValueError where a fixed pool can never hold a request of `slots` tokens."""
        room = self.k.shape[1] * PAGE_SIZE
        if self.fixed and slots > room:
            raise ValueError(
                f"prompt: with its answer and a tree it needs room for {slots} tokens, the cache has {room}"
            )

    def has_room(self, slots: int) -> bool:
        """Returns whether pages for `slots` tokens and a request's state are free now, or can be made.

        Counts prefix hits as if they were misses: a drafter's own cache of as many pages may share less.
        """
        with self._lock:
            self._take_back()
            if self.states and not self.states.has_room:
                return False
            return not self.fixed or -(-slots // PAGE_SIZE) <= self.k.shape[1] - self._promised

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
            self._shrink(count)
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
            self._peak = max(self._peak, self.k.shape[1] - len(self._free_pages) - self._known.unused)
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

    def _add(self, pages: list[int], text: Sequence[int], sharing: Sharing, filled: bool) -> None:
        for page, known, fills in self._known.add(sharing, text, pages, filled):
            if fills:  # no holder of the known page reads or writes its part in the companions
                for pool in self._companions:
                    pool.copy_page(page, known)
            self._free_pages.append(page)

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
            self._free_pages += known.drop(pages)
        if not self.fixed and known.unused:
            most = self.kept_bytes // sum(pool.page_bytes for pool in self._pools)
            while known.unused > most:
                self._free_pages.append(self._evict())

    def _evict(self) -> int:
        page = self._known.evict()
        if self.states:
            self.states.forget(page)
        return page

    def _allocate(self, count: int) -> list[int]:
        missing = count - len(self._free_pages)
        if missing > 0 and not self.fixed:
            self._grow(missing)
        elif missing > self._known.unused:
            free = len(self._free_pages) + self._known.unused
            raise MemoryError(f"key/value cache: {count} pages are needed, {free} of {self.k.shape[1]} are free")
        else:
            self._free_pages += [self._evict() for _ in range(missing)]
        # The last freed pages first: the system has given them memory already.
        left = len(self._free_pages) - count
        self._free_pages, pages = self._free_pages[:left], self._free_pages[left:]
        return pages

    def _grow(self, missing: int) -> None:
        old = self.k.shape[1]
        new, free = max(old + missing, 2 * old), set(self._free_pages)
        self._resize(new, {page: page for page in range(old) if page not in free})
        self._free_pages = [*reversed(range(old, new)), *self._free_pages]

    def _shrink(self, count: int) -> None:
        """Shrinks a large unused pool to the prefix cache and room for `count` pages, or as many as were used last."""
        if self._promised or self.fixed:
            return
        kept = self._known.pages
        new = len(kept) + max(count, self._peak)  # batches of one size neither shrink nor grow it
        self._peak = 0
        if self.k.nbytes + self.v.nbytes > IDLE_BYTES and self.k.shape[1] > 2 * new:
            numbers = {page: number for number, page in enumerate(kept)}
            self._resize(new, numbers)
            self._known.renumber(numbers)
            if self.states:
                self.states.renumber(numbers)
            self._free_pages = [*reversed(range(len(kept), new))]

    def _resize(self, pages: int, kept: Mapping[int, int]) -> None:
        """Resizes all pools, or none of them."""
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
