"""Reads pairs of hidden state and token for a drafter, and keeps their keys and values beside the target's cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.cache.page_pool import page_bytes
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.hidden_states.device_pairs import DevicePairs
from specengine.drafters.hidden_states.pair_network import PairNetwork
from specengine.drafters.hidden_states.pairs import PairRows, Pairs, UnreadPairs
from specengine.drafters.one_engine import OneEngine
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.row_tools import take_rows
from specengine.utils.host_memory import is_host

MOST_WAITING = 64  # pairs


class PairReader:
    """Keeps each request's unread pairs, and hands them to the network in the order of the text.

    Of requests that the drafter does not read it keeps none, so nothing is drafted for them.

    drafter: its name, for errors.  hidden_state_layers: number of layers whose input the network reads.
    levels: of the drafter's deepest tree.  beyond: positions behind the pairs that a draft on the host reaches.
    """

    def __init__(
        self,
        drafter: str,
        network: PairNetwork,
        target: Transformer,
        *,
        hidden_state_layers: int,
        levels: int,
        beyond: int,
    ) -> None:
        c = network.config
        self.network = network
        self._engine = OneEngine(drafter)
        self._levels, self._beyond = levels, beyond
        self._layers = hidden_state_layers
        self._kv_shape = (c.num_layers, c.num_kv_heads, c.head_dim)
        self._kv_dtype = target.cache_dtype
        self._device, self._positions = target.device, target.config.max_position
        self._masked = target.ops.on_device
        # A pass on the CPU writes tensors of its own; on CUDA the next replay of a graph writes the same ones again.
        self._keeps_passes = is_host(target.device)
        self._pages: list[list[int]] = []  # of the last block table
        self._table = torch.empty(0, 0, dtype=torch.int32)

    @property
    def page_bytes(self) -> int:
        """Device memory beside each page of the target's cache."""
        return page_bytes(self._kv_shape, self._kv_dtype)

    def attach(self, cache: KVCache) -> None:
        """Allocates pages beside the target's. Raises ValueError for a second engine's cache."""
        self._engine.claim()
        self._cache = cache
        if cache.fixed:
            # Captured graphs hold on to the rotary tables, and draft beyond the end of the context too.
            self.network.ensure_positions(self._positions + self._levels)
        self.pool = cache.companion(*self._kv_shape, self._kv_dtype)

    def filled(self, request: DraftRequest) -> int:
        """Returns how many of a request's first slots hold their final keys and values."""
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
        self, requests: Sequence[DraftRequest], committed: Sequence[list[int]], hidden_states: HiddenStates
    ) -> None:
        """Adds the pairs of the committed tokens."""
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

    def begin_draft(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Begins a draft; returns the indices of the requests that can be drafted for."""
        # A prompt of one token has no pair yet.
        return [i for i, s in enumerate(requests) if self.pairs_of(s).count and s.draft_limit > 0]

    def skip_draft(self, requests: Sequence[DraftRequest]) -> None:
        """Reads pairs where many wait: the next draft reads all unread pairs, and should not become a long one."""
        if late := [request for request in requests if self.pairs_of(request).count > MOST_WAITING]:
            self.cache_all_but_last(late)

    def take(self, requests: Sequence[DraftRequest], counts: Sequence[int]) -> tuple[PairRows, CacheBatch]:
        """Takes the first pairs of every request; returns them as rows, and where their keys and values go."""
        pairs = self.of(requests)
        place = self.place(requests, [own.first for own in pairs])
        read = PairRows.take(requests, pairs, counts, self._device, self._masked)
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

    def catch_up(self, batch: DraftBatch) -> None:
        """Caches all waiting pairs of the slots on the device but the last of each."""
        state: DevicePairs = batch.drafter_state
        place = CacheBatch(batch.cache.block_table, state.first[: batch.size])
        self.network.cache_pairs(state.late_rows(batch), place, self.pool)
        state.forget_late(batch)

    def new_device_state(self, slots: int) -> DevicePairs:
        """Returns the pairs of so many slots on the device."""
        like = torch.empty(self.network.picked_shape(self._layers), dtype=self.network.kept_dtype, device=self._device)
        return DevicePairs(slots, self._levels + 1, like)
