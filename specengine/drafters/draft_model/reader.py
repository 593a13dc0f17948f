"""What a draft model reads of the text: its tokens, whose keys and values lie in the model's own cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specengine._C import PAGE_SIZE
from specengine.cache.cache_batch import CacheBatch
from specengine.cache.kv_cache import KVCache
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.draft_model.small_model import SmallModel, State
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.growth import Opened
from specengine.drafters.reader import Reader
from specengine.drafters.text_state import TextState
from specengine.models.transformer import Transformer


class DeviceState(TextState):
    """Knows the pages of every slot in the model's cache too, int32 [slots, P].

    positions: of the longest request, with its drafts.
    """

    def __init__(self, slots: int, most: int, positions: int, device: torch.device) -> None:
        super().__init__(slots, most, device)
        self.pages = torch.zeros(slots, -(-positions // PAGE_SIZE), dtype=torch.int32, device=device)


class ModelReader(Reader):
    """Keeps the text of each request in the cache of a small model.

    levels, nodes: of the largest tree, root included.  rows: of a request in the pass of a level.
    """

    def __init__(self, small: SmallModel, target: Transformer, levels: int, nodes: int, rows: int) -> None:
        self.small, self._nodes, self._positions = small, nodes, target.config.max_position + nodes
        self._device, self._masked = small.model.device, small.model.ops.on_device
        self._most = levels + 2  # tokens that a cycle commits, and the root before them
        self._short = small.model.config.max_position < target.config.max_position
        self.page_bytes = small.model.page_bytes
        self.device_rows = max(self._most, rows)

    def attach(self, cache: KVCache) -> None:
        self.small.attach(cache)
        if cache.fixed:  # captured graphs hold on to the rotary tables
            self.small.model.ensure_positions(self._positions)

    def can_draft(self, request: DraftRequest) -> bool:
        return len(request.tokens) <= self.small.model.config.max_position

    def limit(self, request: DraftRequest) -> int:
        """Ends drafts where the model's own context does."""
        return min(super().limit(request), self.small.model.config.max_position - len(request.tokens) + 1)

    def keep_chains(self, requests: Sequence[DraftRequest], tokens: torch.Tensor) -> None:
        """Counts drafted chains as cached, as far as they are accepted. tokens: int [B, T], those that were passed."""
        for request, own in zip(requests, tokens.tolist(), strict=True):
            self._state(request).ahead = own

    def open(self, requests: Sequence[DraftRequest], levels: int) -> Opened:
        small, device, states = self.small, self._device, [self._state(request) for request in requests]
        # requests that end earlier are passed on with the others, beyond the model's context too
        small.model.ensure_positions(max(len(request.tokens) for request in requests) + levels)
        small.catch_up(requests, states, max(self._most, small.model.ops.prefill_rows // len(requests)))
        cached = [state.cached for state in states]
        rows = TreeBatch.chains(
            [request.tokens[count:] for request, count in zip(requests, cached, strict=True)],
            device,
            masked=self._masked,
        )
        place = small.cache.batch([state.pages for state in states], cached, final=False, rooted=False)
        for request, state in zip(requests, states, strict=True):
            state.cached = len(request.tokens) - small.hybrid
        before = np.array([len(request.tokens) - 1 for request in requests], dtype=np.int32)
        root_place = CacheBatch(place.block_table, torch.from_numpy(before).to(device), states=place.states)
        roots = torch.tensor([[request.tokens[-1]] for request in requests], dtype=torch.int32, device=device)
        known = torch.ones(len(requests), dtype=torch.int32, device=device)
        last = rows.row_start[1:].long() - 1
        return Opened(rows, last, roots, known, small.cache, place, root_place)

    def new_device_state(self, slots: int) -> DeviceState:
        return DeviceState(slots, self._most, self._positions, self._device)

    def load(self, state: DeviceState, slot: int, request: DraftRequest) -> None:
        own = self._state(request)
        self.small.catch_up([request], [own], self._most)
        state.pages[slot, : len(own.pages)] = torch.tensor(own.pages, dtype=torch.int32)
        state.count(slot, own.cached, len(request.tokens) - own.cached)

    def unload(self, state: DeviceState, slot: int, request: DraftRequest | None) -> None:
        if request:
            own = self._state(request)
            own.cached, own.ahead = int(state.first[slot]), []
        state.first[slot] = 0

    def before_cycle(self, batch: DraftBatch) -> None:
        state = batch.drafter_state
        if state.backlog.is_late(batch.nodes):
            table = state.pages[: batch.size]
            text = state.late(batch, table)
            self.small.model.hidden(text.rows, self.small.cache, CacheBatch(table, text.first))

    def open_on_device(self, batch: DraftBatch, levels: int) -> Opened:
        state, table = batch.drafter_state, batch.drafter_state.pages[: batch.size]
        text = state.committed(batch, table)
        known = text.running
        if self._short:  # drafts end before the model's context does
            known = known * (text.root_positions + levels <= self.small.model.config.max_position)
        places = CacheBatch(table, text.first), CacheBatch(table, text.root_positions)
        return Opened(text.rows, text.last, text.roots, known, self.small.cache, *places)

    def _state(self, request: DraftRequest) -> State:
        states = request.drafter_states
        if self.small not in states:
            states[self.small] = State(*self.small.begin(request, self._nodes))
        return states[self.small]
