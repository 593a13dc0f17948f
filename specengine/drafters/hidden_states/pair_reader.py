"""Reads pairs of hidden state and token for a drafter, and keeps their keys and values beside the target's cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.cache.page_pool import page_bytes
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.reading_choice import ReadingChoice
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.hidden_states.device_pairs import DevicePairs
from specengine.drafters.hidden_states.pair_network import PairNetwork
from specengine.drafters.hidden_states.pairs import PairRows, Pairs, PairState, UnreadPairs, take_pairs
from specengine.drafters.one_engine import OneEngine
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.row_tools import take_rows

MOST_WAITING = 64  # pairs, and cycles without a draft


class PairReader:
    """Keeps each request's unread pairs, and hands them to the network in the order of the text.

    drafter: its name, for errors.  hidden_state_layers: number of layers whose input the network reads.
    levels: of the drafter's deepest tree.  beyond: positions behind the pairs that a draft on the host reaches.
    costs: of a target pass; None: every request is read.
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
        costs: CostModel | None,
    ) -> None:
        c = network.config
        self.network = network
        self.readings = ReadingChoice()
        self._engine = OneEngine(drafter)
        self._adapts = costs is not None
        self._levels, self._beyond = levels, beyond
        self._layers = hidden_state_layers
        self._kv_shape = (c.num_layers, c.num_kv_heads, c.head_dim)
        self._kv_dtype = target.cache_dtype
        self._device, self._positions = target.device, target.config.max_position
        # A pass on the CPU writes tensors of its own; on CUDA the next replay of a graph writes the same ones again.
        self._keeps_passes = target.device.type == "cpu"
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

    def skips_reading(self, batch: int) -> bool:
        """Returns whether to read nothing of a request that begins in a batch of this size."""
        return self._adapts and self.readings.should_skip(batch)

    def filled(self, request: DraftRequest) -> int:
        """Returns how many of a request's first slots hold their final keys and values."""
        return request.drafter_state.pairs.first if request.drafter_state else 0

    def state(self, request: DraftRequest) -> PairState:
        """Returns what is remembered of a request; begins it where there is nothing yet."""
        if request.drafter_state is None:
            request.drafter_state = PairState(behind=request.skips_drafter_cache)
        return request.drafter_state

    def of(self, requests: Sequence[DraftRequest]) -> list[Pairs]:
        """Returns every request's unread pairs."""
        return [self.state(request).pairs for request in requests]

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        """Reads a chunk of a prompt from position `start` on."""
        if request.drafter_state is None:
            request.drafter_state = PairState(Pairs(start), behind=request.skips_drafter_cache)
        if request.drafter_state.behind:
            return
        pairs = request.drafter_state.pairs
        pairs.add(self.network.pick(hidden_states))
        if pairs.count > 1:
            self.read_ahead([request])

    def observe(
        self, requests: Sequence[DraftRequest], committed: Sequence[list[int]], hidden_states: HiddenStates
    ) -> None:
        """Adds the pairs of the committed tokens."""
        states = [self.state(request) for request in requests]
        if all(state.behind for state in states):
            return
        whole, rows = hidden_states.origin
        picked = self.network.pick(whole)
        if rows is None:
            rows = range(len(picked))
        first = 0
        for state, tokens in zip(states, committed, strict=True):
            end = first + len(tokens)
            if not state.behind and self._keeps_passes:
                state.pairs.add_rows(picked, rows[first:end])
            elif not state.behind:
                state.pairs.add(take_rows(picked, rows[first:end]))
            first = end

    def begin_draft(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Begins a draft; returns the indices of the requests that can be drafted for."""
        # A prompt of one token has no pair yet.
        ready = [i for i, s in enumerate(requests) if self.state(s).pairs.count and s.draft_limit > 0]
        self.note_batch(requests)
        for i in ready:
            self.state(requests[i]).skipped = 0
        return ready

    def skip_draft(self, requests: Sequence[DraftRequest]) -> None:
        """Notes a cycle without a draft; reads pairs, or leaves requests behind, where many pairs wait."""
        self.note_batch(requests)
        late: list[DraftRequest] = []
        for request in requests:
            state = self.state(request)
            state.skipped += 1
            if state.pairs.count > MOST_WAITING:
                # Where drafts do not pay, reading for them does not pay either, unless later requests share it.
                if state.skipped > MOST_WAITING and not (request.sharing and request.sharing.answers):
                    state.leave_behind()
                else:
                    late.append(request)
        if late:  # the next draft reads all unread pairs, and should not become a long one
            self.read_ahead(late)

    def take(self, requests: Sequence[DraftRequest], counts: Sequence[int]) -> tuple[PairRows, CacheBatch]:
        """Takes the first pairs of every request; returns them as rows, and where their keys and values go."""
        pairs = self.of(requests)
        place = self.place(requests, [own.first for own in pairs])
        read = PairRows.take(requests, pairs, counts, self._device)
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

    def take_all_runs(self, requests: Sequence[DraftRequest]) -> tuple[list[list[int]], torch.Tensor, CacheBatch]:
        """Takes every unread pair; returns tokens, hidden states [M, ..] and where keys and values go."""
        pairs = self.of(requests)
        place = self.place(requests, [own.first for own in pairs])
        runs, picked = take_pairs(requests, pairs, [own.count for own in pairs])
        self.network.ensure_positions(max([own.first for own in pairs]) + self._beyond)
        return runs, picked, place

    def place(self, requests: Sequence[DraftRequest], lengths: Sequence[int]) -> CacheBatch:
        """Returns the pages of requests of which so many slots are filled."""
        pages = [request.pages for request in requests]
        if pages != self._pages:  # they rarely change, and a table takes longer to make than to compare
            self._pages = [[*own] for own in pages]
            self._table = self._cache.batch(pages, lengths).block_table
        filled = torch.from_numpy(np.array(lengths, dtype=np.int32))
        return CacheBatch(self._table, filled if self._device.type == "cpu" else filled.to(self._device))

    def read_ahead(self, requests: Sequence[DraftRequest]) -> None:
        """Reads all pairs but the last ones, from which the next draft goes on; counts the time as a loss."""
        begin = time.perf_counter()
        self.cache_all_but_last(requests)
        self.record_gain(requests, begin - time.perf_counter())

    def cache_all_but_last(self, requests: Sequence[DraftRequest]) -> None:
        """Caches all pairs but each request's last."""
        read, place = self.take(requests, [own.count - 1 for own in self.of(requests)])
        self.network.cache_pairs(read, place, self.pool)

    def record_gain(self, requests: Sequence[DraftRequest], saved: float) -> None:
        """Shares saved seconds among the requests that are read."""
        states = [state for state in map(self.state, requests) if not state.behind]
        for state in states:
            state.gained += saved / len(states)

    def note_batch(self, requests: Sequence[DraftRequest]) -> None:
        """Notes the batch size of requests that could be drafted for; the others' gains measure nothing."""
        for request in requests:
            state = self.state(request)
            if request.draft_limit > 0 and not state.behind:
                state.batch = max(state.batch, len(requests))

    def release(self, request: DraftRequest) -> None:
        """Ends a request, and records what reading it gained."""
        state, request.drafter_state = request.drafter_state, None
        if state is not None and state.batch and self._adapts:
            self.readings.record_gain(state.batch, state.gained)

    def new_device_state(self, slots: int) -> DevicePairs:
        """Returns the pairs of so many slots on the device."""
        return DevicePairs(slots, self._levels + 1, self.network.picked_shape(self._layers), self._device)
