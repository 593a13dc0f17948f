"""Reads pairs of hidden state and token for a drafter, and keeps their keys and values beside the target's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.cache.page_pool import page_bytes
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.growth import Opened
from specengine.drafters.hidden_states.device_pairs import DevicePairs
from specengine.drafters.hidden_states.pair_network import NativePairNetwork, PairNetwork
from specengine.drafters.hidden_states.pairs import PairRows, Pairs, UnreadPairs
from specengine.drafters.native import Unread
from specengine.drafters.one_engine import OneEngine
from specengine.drafters.reader import Reader
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.growth.pairs import Masks
from specengine.ops.row_tools import take_rows
from specengine.utils.host_memory import is_host

MOST_WAITING = 64  # pairs


class PairReader(Reader):
    """Keeps each request's unread pairs, and hands them to the network in the order of the text.

    Of requests that the drafter does not read it keeps none, so nothing is drafted for them.

    drafter: its name, for errors.  hidden_state_layers: those whose input the network reads.
    levels: of the drafter's deepest tree.  rows: of a request in the drafter's largest pass.
    beyond: positions after the pairs that a draft on the host reaches.
    behind: where node 0 of a draft lies, in slots after the last pair; 0: it is that pair.
    mask_token: of drafters that draft all levels in one pass, with masks after the last pair.
    """

    reads_hidden_states = True

    def __init__(
        self,
        drafter: str,
        network: PairNetwork,
        target: Transformer,
        *,
        hidden_state_layers: tuple[int, ...],
        levels: int,
        beyond: int,
        rows: int = 1,
        behind: int = 0,
        mask_token: int | None = None,
    ) -> None:
        c = network.config
        self.network = network
        self._engine = OneEngine(drafter)
        self._levels, self._beyond = levels, beyond
        self.hidden_state_layers, self._behind = hidden_state_layers, behind
        self._mask_token, self._most_masks = mask_token, 0 if mask_token is None else levels - 1
        self.device_rows = max(1 + levels + self._most_masks, rows)  # unread pairs and masks, or those of a draft
        self._kv_shape = (c.num_layers, c.num_kv_heads, c.head_dim)
        self._kv_dtype = target.cache_dtype
        self.page_bytes = page_bytes(self._kv_shape, self._kv_dtype)
        self._device, self._positions = target.device, target.config.max_position
        self._masked = target.ops.on_device
        # A pass on the CPU writes tensors of its own; on CUDA the next replay of a graph writes the same ones again.
        self._keeps_passes = is_host(target.device)
        self._pages: list[list[int]] = []  # of the last block table
        self._table = torch.empty(0, 0, dtype=torch.int32)

    def attach(self, cache: KVCache) -> None:
        self._engine.claim()
        self._cache = cache
        if cache.fixed:
            # Captured graphs hold on to the rotary tables, and draft beyond the end of the context too.
            self.network.ensure_positions(self._positions + self._levels)
        self.pool = cache.companion(*self._kv_shape, self._kv_dtype)

    def filled(self, request: DraftRequest) -> int:
        pairs = request.drafter_states.get(self)
        return pairs.first if pairs else 0

    def pairs_of(self, request: DraftRequest, start: int = 0) -> Pairs:
        """Returns the unread pairs of a request; where there is nothing yet, they begin at pair `start`."""
        if self not in request.drafter_states:
            request.drafter_states[self] = Pairs(start)
        return request.drafter_states[self]

    def of(self, requests: Sequence[DraftRequest]) -> list[Pairs]:
        """Returns every request's unread pairs."""
        return [self.pairs_of(request) for request in requests]

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        """Reads a chunk of a prompt from position `start` on; of the last chunk one pair waits for the draft."""
        pairs = self.pairs_of(request, start)
        pairs.add(self.network.pick(hidden_states).float())
        if pairs.first + pairs.count < len(request.tokens) - 1:
            # the pages of this chunk are then filled to their end, so that they can be shared at once
            self.network.cache_pairs(*self.take_all([request]), self.pool)
        elif pairs.count > 1:
            self.cache_all_but_last([request])

    def observe(
        self, requests: Sequence[DraftRequest], committed: Sequence[list[int]], hidden_states: HiddenStates | None
    ) -> None:
        """Adds the pairs of the committed tokens."""
        assert hidden_states is not None  # it reads them
        if not any(request.drafter_reads for request in requests):
            return
        whole, rows = hidden_states.origin
        picked = self.network.pick(whole).float()
        if rows is None:
            rows = range(len(picked))
        first = 0
        for request, tokens in zip(requests, committed, strict=True):
            end = first + len(tokens)
            if request.drafter_reads and self._keeps_passes:
                self.pairs_of(request).add_rows(picked, rows[first:end])
            elif request.drafter_reads:
                self.pairs_of(request).add(take_rows(picked, rows[first:end]))
            first = end

    def skip(self, requests: Sequence[DraftRequest]) -> None:
        """Reads pairs where many wait: the next draft reads all unread pairs, and should not become a long one."""
        if late := [request for request in requests if self.pairs_of(request).count > MOST_WAITING]:
            self.cache_all_but_last(late)

    def can_draft(self, request: DraftRequest) -> bool:
        return self.pairs_of(request).count > 0  # a prompt of one token has no pair yet

    def open(self, requests: Sequence[DraftRequest], levels: int) -> Opened:
        read, place = self.take(requests, [own.count for own in self.of(requests)], self._masks(levels))
        behind = self.place(requests, [own.first - 1 + self._behind for own in self.of(requests)])
        roots = torch.from_numpy(np.array([[request.tokens[-1]] for request in requests], dtype=np.int32))
        roots = roots.to(self._device)
        if (blocks := self.network.block_tokens(len(requests))) is not None:
            blocks[:, :1] = roots
        text = (roots, torch.ones(len(requests), dtype=torch.int32, device=self._device), self.pool)
        return Opened(read.rows, read.last, *text, place, behind, read.hidden_states, self._origin(read), read.above)

    def unread(self, requests: Sequence[DraftRequest]) -> Unread:
        unread = self.take_unread(requests)
        network = cast(NativePairNetwork, self.network)  # its drafter has a native draft
        picked = network.native_rows(unread.hidden_states, unread.rows)
        caches = [(self.pool.k, self.pool.v, *network.cos_sin)]
        return Unread(unread.tokens, *picked, [s.pages for s in requests], unread.cached, caches)

    def take(
        self, requests: Sequence[DraftRequest], counts: Sequence[int], masks: Masks | None = None
    ) -> tuple[PairRows, CacheBatch]:
        """Takes the first pairs of every request; returns them as rows, and where their keys and values go."""
        pairs = self.of(requests)
        place = self.place(requests, [own.first for own in pairs])
        read = PairRows.take(requests, pairs, counts, self._device, self._masked, masks)
        self.network.ensure_positions(max(own.first for own in pairs) + self._beyond)
        return read, place

    def take_all(self, requests: Sequence[DraftRequest]) -> tuple[PairRows, CacheBatch]:
        """Takes every unread pair, as take() does."""
        return self.take(requests, [own.count for own in self.of(requests)])

    def take_unread(self, requests: Sequence[DraftRequest]) -> UnreadPairs:
        """Takes every unread pair."""
        unread = UnreadPairs.take(requests, self.of(requests))
        last = max([first + len(own) for first, own in zip(unread.cached, unread.tokens, strict=True)])
        self.network.ensure_positions(last + self._beyond)
        return unread

    def place(self, requests: Sequence[DraftRequest], lengths: Sequence[int]) -> CacheBatch:
        """Returns the pages of requests of which so many slots are filled."""
        pages = [request.pages for request in requests]
        if pages != self._pages:  # they rarely change, and a table takes longer to make than to compare
            self._pages = [[*own] for own in pages]
            self._table = self._cache.batch(pages, lengths).block_table
        filled = torch.from_numpy(np.array(lengths, dtype=np.int32))
        return CacheBatch(self._table, filled if is_host(self._device) else filled.to(self._device))

    def cache_all_but_last(self, requests: Sequence[DraftRequest]) -> None:
        """Caches all pairs but each request's last, from which the next draft goes on."""
        read, place = self.take(requests, [own.count - 1 for own in self.of(requests)])
        self.network.cache_pairs(read, place, self.pool)

    def new_device_state(self, slots: int) -> DevicePairs:
        shape = self.network.picked_shape(len(self.hidden_state_layers))
        like = torch.empty(shape, dtype=self.network.kept_dtype, device=self._device)
        return DevicePairs(slots, self._levels + 1, like, self._most_masks)

    def load(self, state: DevicePairs, slot: int, request: DraftRequest) -> None:
        state.load(slot, self.pairs_of(request))

    def unload(self, state: DevicePairs, slot: int, request: DraftRequest | None) -> None:
        if request:
            state.unload(slot, self.pairs_of(request))
        state.clear(slot)

    def before_cycle(self, batch: DraftBatch) -> None:
        state: DevicePairs = batch.drafter_state
        if state.backlog.is_late(batch.nodes):
            place = CacheBatch(batch.cache.block_table, state.first[: batch.size])
            self.network.cache_pairs(state.late_rows(batch), place, self.pool)
            state.forget_late(batch)

    def observe_on_device(self, batch: DraftBatch, hidden_states: HiddenStates) -> None:
        batch.drafter_state.observe(batch, self.network.pick(hidden_states))

    def open_on_device(self, batch: DraftBatch, levels: int) -> Opened:
        state: DevicePairs = batch.drafter_state
        waiting = state.rows(batch, self.network.block_tokens(batch.size), self._masks(levels))
        read, behind = waiting.pairs, waiting.next if self._behind else waiting.last
        text = (waiting.roots, waiting.counts, self.pool)
        pairs = (read.hidden_states, self._origin(read), read.above)
        return Opened(read.rows, read.last, *text, waiting.place, behind, *pairs)

    def _origin(self, read: PairRows) -> torch.Tensor | None:
        """Returns the rows that drafted ones go on from; None: a draft after the pairs begins with rows of its own."""
        return None if self._behind else read.origin

    def _masks(self, levels: int) -> Masks | None:
        """Returns the masks of a draft."""
        return None if self._mask_token is None else Masks(self._mask_token, levels - 1)
