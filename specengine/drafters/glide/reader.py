"""What GLIDE reads of the text: its tokens, whose keys and values lie in a cache of its own beside the target's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specengine.cache.cache_batch import CacheBatch
from specengine.cache.kv_cache import KVCache
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.glide.network import GlideNetwork
from specengine.drafters.glide.rows import GlideRows, PassRows, SeenTarget
from specengine.drafters.growth import Opened
from specengine.drafters.native import Unread
from specengine.drafters.one_engine import OneEngine
from specengine.drafters.reader import Reader
from specengine.drafters.text_state import TextState
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.growth.text_rows import TextRows


class GlideReader(Reader):
    """Remembers of each request how many of its first tokens have final rows in the drafter's cache.

    drafter: its name, for errors.  levels: of the deepest draft.
    """

    def __init__(self, drafter: str, network: GlideNetwork, target: Transformer, levels: int) -> None:
        self.network, self._levels, self._positions = network, levels, target.config.max_position
        self._engine = OneEngine(drafter)
        self._device, self._prefill_rows = target.device, target.ops.prefill_rows
        self._masked = target.ops.on_device
        self.page_bytes = network.page_bytes
        self.device_rows = levels + 2  # tokens that a cycle commits, and the root before them

    def attach(self, cache: KVCache) -> None:
        self._engine.claim()
        self.network.attach(cache)
        if cache.fixed:  # captured graphs hold on to the rotary tables
            self.network.ensure_positions(self._positions + self._levels)

    def filled(self, request: DraftRequest) -> int:
        return request.drafter_states.get(self, 0)

    def can_draft(self, request: DraftRequest) -> bool:
        return len(request.tokens) > 1  # a prompt of one token is in no cache yet

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        """Reads the chunk at once, so that the next prompt that begins alike finds it cached."""
        self._catch_up(request, len(request.tokens) - start - len(hidden_states), start)

    def unread(self, requests: Sequence[DraftRequest]) -> Unread:
        """Takes the tokens of every request that are not cached, few enough for one pass.

        The root is passed again once the target has cached its keys.
        """
        most = max(self.device_rows, self._prefill_rows // len(requests))
        starts = [self._catch_up(request, most) for request in requests]
        for request in requests:
            request.drafter_states[self] = len(request.tokens) - 1
        runs = [request.tokens[start:] for request, start in zip(requests, starts, strict=True)]
        return Unread(runs, None, (), [request.pages for request in requests], starts, self.network.native_caches)

    def open(self, requests: Sequence[DraftRequest], levels: int) -> Opened:
        unread = self.unread(requests)
        rows, place, last = self._rows(requests, unread.runs, unread.cached)
        roots = np.array([[request.tokens[-1]] for request in requests], dtype=np.int32)
        known = torch.ones(len(requests), dtype=torch.int32, device=self._device)
        root_place = CacheBatch(place.block_table, rows.seen_later.lengths + 1)
        text = (torch.from_numpy(roots).to(self._device), known, self.network.pool)
        return Opened(rows, last, *text, place, root_place)

    def new_device_state(self, slots: int) -> TextState:
        state = TextState(slots, self.device_rows, self._device, block=self.network.block)
        # of rows that are a request of their own; captured graphs hold on to it
        self._each = torch.arange(slots * state.backlog.room + 1, dtype=torch.int32, device=self._device)
        return state

    def load(self, state: TextState, slot: int, request: DraftRequest) -> None:
        cached = self._catch_up(request, self.device_rows)
        state.count(slot, cached, len(request.tokens) - cached)

    def unload(self, state: TextState, slot: int, request: DraftRequest | None) -> None:
        if request:
            request.drafter_states[self] = int(state.first[slot])
        state.first[slot] = 0

    def before_cycle(self, batch: DraftBatch) -> None:
        state, table = batch.drafter_state, batch.cache.block_table
        if state.backlog.is_late(batch.nodes):
            text = state.late(batch, table)
            rows = self._device_rows(text, table)
            self.network.states(PassRows(rows, CacheBatch(table, text.first), rows.seen))

    def open_on_device(self, batch: DraftBatch, levels: int) -> Opened:
        table = batch.cache.block_table
        text = batch.drafter_state.committed(batch, table)
        known = (text.roots, text.running, self.network.pool)
        places = CacheBatch(table, text.first), CacheBatch(table, text.root_positions)
        return Opened(self._device_rows(text, table), text.last, *known, *places)

    def _device_rows(self, text: TextRows, table: torch.Tensor) -> GlideRows:
        rows, seen, each = text.rows, text.seen, self._each
        own = SeenTarget(seen.block_table, seen.lengths, each[: len(rows.tokens) + 1], seen.ancestors)
        later = SeenTarget(table, text.last_seen, each[: len(table) + 1], text.running[:, None])
        return GlideRows(rows.tokens, rows.depths, rows.row_start, rows.ancestors, own, later)

    def _catch_up(self, request: DraftRequest, most: int, first: int = 0) -> int:
        """Passes tokens until at most `most` are left: a prompt is more than one pass should hold.

        first: cached tokens of a request that is new.  Returns how many are cached.
        """
        if self not in request.drafter_states and not self.network.cache.fixed:
            self.network.ensure_positions(request.prompt_length + request.limit + self._levels)
        cached = request.drafter_states.get(self, first)
        while (waiting := len(request.tokens) - cached) > most:
            run = request.tokens[cached : cached + min(self._prefill_rows, waiting - most)]
            rows, place, _ = self._rows([request], [run], [cached])
            self.network.states(PassRows(rows, place, rows.seen))
            cached += len(run)
        request.drafter_states[self] = cached
        return cached

    def _rows(
        self, requests: Sequence[DraftRequest], runs: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> tuple[GlideRows, CacheBatch, torch.Tensor]:
        """Returns a chain of each request, where it lies in the drafter's cache, and each one's last row, int64 [B]."""
        place = self.network.cache.batch([request.pages for request in requests], starts)
        rows = TreeBatch.chains(runs, self._device, masked=self._masked)
        verified = [len(request.tokens) - 1 for request in requests]
        return GlideRows.of(rows, place, verified, self.network.block), place, rows.row_start[1:].long() - 1
