"""Reads the text for PARD: row t is token t with the target's feature of position t - 1, its keys and values in slot t.

They lie beside the target's pages. A request whose first pages were found in the prefix cache needs one feature more
than the target computes for it: that of the last position found. It is kept beside each page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.cache.page_pool import PagePool, page_bytes
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.growth import Opened
from specengine.drafters.hidden_states.pairs import Pairs
from specengine.drafters.one_engine import OneEngine
from specengine.drafters.pard.features import TargetFeatures
from specengine.drafters.pard.network import PardNetwork
from specengine.drafters.reader import Reader
from specengine.drafters.text_state import TextState
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.growth.text_rows import TextRows
from specengine.ops.row_tools import stack_rows, take_rows

MOST_WAITING = 64  # rows
FEATURE_TYPE = torch.float32


@dataclass
class RowState:
    """What is remembered of one request.

    cached: rows whose keys and values are final.  features: of the rows behind them, as far as they are known.
    """

    cached: int = 0
    features: Pairs = field(default_factory=Pairs)


class PageFeatures:
    """Keeps the feature of every page's last position: float32 [hidden], spread over the page's slots."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden
        self._shape = (1, 1, -(-hidden // (2 * PAGE_SIZE)))
        self.page_bytes = page_bytes(self._shape, FEATURE_TYPE)

    def attach(self, cache: KVCache) -> None:
        """Allocates room beside the target's pages."""
        self._pool = cache.companion(*self._shape, FEATURE_TYPE)

    def keep(self, pages: Sequence[int], first: int, features: torch.Tensor) -> None:
        """Keeps those features [M, hidden], of positions from `first` on, that are their page's last."""
        for row in range(-(first + 1) % PAGE_SIZE, len(features), PAGE_SIZE):
            page = pages[(first + row) // PAGE_SIZE]
            own = torch.zeros(2, PAGE_SIZE * self._shape[2], device=features.device)
            own.view(-1)[: self._hidden] = features[row]
            for half, values in zip(self._halves(page), own, strict=True):
                half.copy_(values.view(half.shape))

    def of(self, page: int) -> torch.Tensor:
        """Returns the feature of a page's last position, [1, hidden]."""
        return torch.cat([half.flatten() for half in self._halves(page)])[None, : self._hidden]

    def _halves(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool.k[0, page, 0], self._pool.v[0, page, 0]


class RowReader(Reader):
    """Keeps the rows of each request's text cached, and lays out those of drafts after them.

    drafter: its name, for errors.  mask_token: of drafted rows.  features: of the target; None: rows have none.
    levels: of the deepest tree.
    """

    pool: PagePool

    def __init__(
        self,
        drafter: str,
        network: PardNetwork,
        mask_token: int,
        features: TargetFeatures | None,
        target: Transformer,
        levels: int,
    ) -> None:
        c = network.config
        self.hidden_state_layers = features.hidden_state_layers if features else ()
        self.reads_hidden_states = features is not None
        self.device_rows = 2 * levels + 1  # what a cycle commits and the root, then masks
        self._levels, self._positions = levels, target.config.max_position
        self._engine = OneEngine(drafter)
        self._network, self._mask_token, self._features = network, mask_token, features
        self._kv_shape, self._kv_dtype = (c.num_layers, c.num_kv_heads, c.head_dim), network.model.cache_dtype
        self._pages = PageFeatures(c.hidden_size) if features else None
        self._hidden, self._device, self._most = c.hidden_size, target.device, target.ops.prefill_rows
        self._masked = target.ops.on_device
        self.page_bytes = page_bytes(self._kv_shape, self._kv_dtype) + (self._pages.page_bytes if self._pages else 0)

    def attach(self, cache: KVCache) -> None:
        self._engine.claim()
        self._cache = cache
        if cache.fixed:  # captured graphs hold on to the rotary tables
            self._network.ensure_positions(self._positions + self._levels)
        self.pool = cache.companion(*self._kv_shape, self._kv_dtype)
        if self._pages:
            self._pages.attach(cache)

    def filled(self, request: DraftRequest) -> int:
        state = request.drafter_states.get(self)
        return state.cached if state else 0

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        """Reads a chunk; the row after it waits."""
        self._state(request, start)
        if self._features:
            self._add(request, start, self._features(hidden_states))
        self._read_up_to(request, start + len(hidden_states))

    def observe(
        self, requests: Sequence[DraftRequest], committed: Sequence[list[int]], hidden_states: HiddenStates | None
    ) -> None:
        """Adds the features of committed paths; without features, nothing is to be added."""
        if self._features is None or hidden_states is None:
            return
        features = self._features(hidden_states).split([len(tokens) for tokens in committed])
        for request, own in zip(requests, features, strict=True):
            if request.drafter_reads:
                self._state(request)
                self._add(request, len(request.tokens) - 1 - len(own), own)

    def skip(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            if request.drafter_reads and len(request.tokens) - self._state(request).cached > MOST_WAITING:
                self._read_up_to(request, len(request.tokens) - 1)

    def can_draft(self, request: DraftRequest) -> bool:
        return self._state(request).cached < len(request.tokens)  # its last token is still to be read

    def open(self, requests: Sequence[DraftRequest], levels: int) -> Opened:
        """Begins a draft: the text up to its last token, and mask tokens with the feature of that token."""
        most = max(1 + levels, self._most // len(requests))
        for request in requests:
            self._read_up_to(request, len(request.tokens) - most)
        states = [self._state(request) for request in requests]
        runs = [request.tokens[state.cached :] for request, state in zip(requests, states, strict=True)]
        place = self._place(requests, [state.cached for state in states], levels)
        masks = [self._mask_token] * (levels - 1)
        rows = TreeBatch.chains([[*run, *masks] for run in runs], self._device, masked=self._masked)
        features = None
        if self._features:
            parts = [state.features.take(len(run)) for state, run in zip(states, runs, strict=True)]
            parts = [take_rows(own, [*range(len(own)), *[len(own) - 1] * (levels - 1)]) for own in parts]
            features = stack_rows(parts)
        for request, state in zip(requests, states, strict=True):
            state.cached = len(request.tokens)
        last = (rows.row_start[1:, None] + torch.arange(-levels, 0, device=self._device)).view(-1)
        roots = torch.tensor([request.tokens[-1:] for request in requests], dtype=torch.int32).to(self._device)
        known = torch.ones(len(requests), dtype=torch.int32, device=self._device)
        return Opened(rows, last, roots, known, self.pool, place, place, features)

    def new_device_state(self, slots: int) -> TextState:
        return TextState(slots, self._levels + 2, self._device, masks=self._levels - 1)

    def load(self, state: TextState, slot: int, request: DraftRequest) -> None:
        self._read_up_to(request, len(request.tokens) - state.backlog.most)
        cached = min(self._state(request).cached, len(request.tokens) - 1)  # the last token is read again
        state.count(slot, cached, len(request.tokens) - cached)

    def unload(self, state: TextState, slot: int, request: DraftRequest | None) -> None:
        if request:
            self._state(request).cached = int(state.first[slot])
        state.first[slot] = 0

    def before_cycle(self, batch: DraftBatch) -> None:
        state: TextState = batch.drafter_state
        table = batch.cache.block_table
        if state.backlog.is_late(batch.nodes):
            text = state.late(batch, table)
            self._network.cache(text.rows, None, CacheBatch(table, text.first), self.pool)

    def open_on_device(self, batch: DraftBatch, levels: int) -> Opened:
        table = batch.cache.block_table
        text: TextRows = batch.drafter_state.committed(batch, table, levels - 1, self._mask_token)
        place = CacheBatch(table, text.first)
        return Opened(text.rows, text.last, text.roots, text.running, self.pool, place, place)

    def _state(self, request: DraftRequest, start: int = 0) -> RowState:
        """Returns what is remembered of a request; begins it with the first `start` rows cached."""
        if self not in request.drafter_states:
            state = request.drafter_states[self] = RowState(start, Pairs(start))
            if self._pages:  # the first row behind those
                before = request.pages[start // PAGE_SIZE - 1]
                state.features.add(
                    self._pages.of(before) if start else torch.zeros(1, self._hidden, device=self._device)
                )
        return request.drafter_states[self]

    def _add(self, request: DraftRequest, first: int, features: torch.Tensor) -> None:
        """Adds the features of positions from `first` on, for the rows behind them."""
        assert self._pages is not None
        self._pages.keep(request.pages, first, features)
        request.drafter_states[self].features.add(features)

    def _read_up_to(self, request: DraftRequest, end: int) -> None:
        """Caches the rows before `end` that are not cached."""
        state = self._state(request)
        while (count := min(end - state.cached, self._most)) > 0:
            run = request.tokens[state.cached : state.cached + count]
            rows = TreeBatch.chains([run], self._device, masked=self._masked)
            features = state.features.take(count) if self._features else None
            self._network.cache(rows, features, self._place([request], [state.cached], 0), self.pool)
            state.cached += count

    def _place(self, requests: Sequence[DraftRequest], starts: Sequence[int], beyond: int) -> CacheBatch:
        """Returns the pages of requests. beyond: rows behind the text."""
        self._network.ensure_positions(max(len(request.tokens) for request in requests) + beyond)
        return self._cache.batch([request.pages for request in requests], starts)
