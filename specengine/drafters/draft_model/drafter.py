"""Drafts with a model: any with the target's vocabulary, or the target's own first layers.

Inside captured cycles it drafts chains of the likeliest tokens, at any temperature, unless a rule reads distributions.

Its cache keeps the committed tokens. A chain goes on row by row, and the keys of accepted tokens stay. A tree is passed
again for every level, as its rows are nearly free; it leaves nothing that would have to be moved.

The states of a hybrid stay behind the token before the root. Every pass of its drafts, chains too, begins at the root
and never writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from specengine.cache.kv_cache import KVCache
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.draft_trees.tree_shape import TreeShape
from specengine.drafters.capabilities import CacheCompanion, DeviceStateDrafter, TokenizerChecker
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.growth import Growth, agreeing_children
from specengine.drafters.distributions.level_logits import LevelDistributions, LevelLogits
from specengine.drafters.draft_model.config import Config
from specengine.drafters.draft_model.device_state import DeviceState
from specengine.drafters.draft_model.small_model import SmallModel, State
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.policies import policy_of
from specengine.drafters.root_tokens import root_trees
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.growth.level_trees import GrowingTrees, GrowthPlan
from specengine.ops.row_tools import confidence, take_rows
from specengine.rules.base import Wants
from specengine.tokenizer import Tokenizer
from specengine.utils.spec_string import check_range


class DraftModel(Drafter, CacheCompanion, LevelDistributions, TokenizerChecker, DeviceStateDrafter):
    """Drafts a cheaper model's likeliest tokens, or tokens drawn from its distributions.

    costs: of cycles; by default learned from them.
    """

    name = "draft_model"
    config_type = Config
    config: Config
    takes_path = True
    offers = frozenset(Wants)

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        self.small = SmallModel(self.name, config.layers, config.dtype, path, target, hybrids=True)
        self.model = self.small.model
        check_range("tree", max(config.widths), 1, self.model.config.vocab_size)
        self._chain = max(config.widths) == 1
        self.shape, self.replacement = TreeShape.of_widths(config.widths), config.replacement
        self.columns, self.logits_device = Columns(self.model.config.vocab_size, None, None), self.model.device
        own, self._positions = self.model.config, target.config.max_position
        self.drafts_in_cycle = (
            self._chain and not self.small.hybrid and not config.confidence and own.max_position >= self._positions
        )
        self.policy = policy_of(self, target, costs, [])
        self._plans: dict[tuple[int, int], GrowthPlan] = {}  # by slots and levels

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return self._chain

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    @property
    def page_bytes(self) -> int:
        return self.small.model.page_bytes

    def attach(self, cache: KVCache) -> None:
        self.small.attach(cache)
        if cache.fixed and self.drafts_in_cycle:  # captured graphs hold on to the rotary tables
            self.model.ensure_positions(self._positions + self.config.nodes)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self.small.check_tokenizer(tokenizer)

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft_whole(requests, partial(self._trees, requests))

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        self.policy.observe(draft, committed)

    def release(self, request: DraftRequest) -> None:
        self.small.release(request)

    @property
    def device_rows(self) -> int:
        return self.config.nodes + 1

    def new_device_state(self, slots: int) -> DeviceState:
        # a cycle commits at most a token per node, and the root comes before them
        return DeviceState(slots, self.device_rows, self._positions + self.config.nodes, self.model.device)

    def load(self, state: DeviceState, slot: int, request: DraftRequest) -> None:
        own = self._state(request)
        self.small.catch_up([request], [own], self.device_rows)
        state.load(slot, own.pages, own.cached, len(request.tokens) - own.cached)

    def unload(self, state: DeviceState, slot: int, request: DraftRequest | None) -> None:
        if request:
            own = self._state(request)
            own.cached, own.ahead = int(state.first[slot]), []
        state.first[slot] = 0

    def before_cycle(self, batch: DraftBatch) -> None:
        state = batch.drafter_state
        if state.backlog.is_late(batch.nodes):
            text = state.late(batch, state.pages[: batch.size])
            self.model.hidden(text.rows, self.small.cache, state.place(batch, text.first))

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        levels = min(len(self.config.widths), batch.nodes - 1)
        if not levels:
            return root_trees(batch)  # a later draft finds the token in the history
        state, model, cache = batch.drafter_state, self.model, self.small.cache
        text = state.committed(batch, state.pages[: batch.size])
        trees = GrowingTrees(self._plan(batch.size, levels), text.roots, text.running, None)
        hidden = model.hidden(text.rows, cache, state.place(batch, text.first))
        rows = trees.expand(model.logits(take_rows(hidden, text.last)))
        place = state.place(batch, text.root_positions)
        while rows is not None:
            rows = trees.expand(model.logits(model.hidden(rows, cache, place, rows.first_node)))
        return batch.selected(*trees.columns, text.running, levels)

    def _plan(self, batch: int, levels: int) -> GrowthPlan:
        """Returns the plan of a batch's chains on the device."""
        key = (batch, levels)
        if key not in self._plans:
            self._plans[key] = GrowthPlan.of(batch, levels, 1, 1, -(-(1 + levels) // 32), self.model.device)
        return self._plans[key]

    def _trees(self, requests: Sequence[DraftRequest], drafts: bool) -> list[DraftTree]:
        if not drafts:
            return [DraftTree(request.tokens[-1:], [-1]) for request in requests]
        choose = agreeing_children(requests, self.config.noise, self.columns, self.model.device)
        return [growth.tree for growth in self.grow_levels(requests, choose)[0]]

    def levels_for(self, request: DraftRequest) -> int:
        return self.small.depth(request)

    def begin_levels(self, trees: Sequence[Growth]) -> LevelLogits:
        return self._logits

    def most_children(self, logits: torch.Tensor, widths: Sequence[int]) -> list[int]:
        """Returns none for a row that the model is unsure of."""
        least = self.config.confidence
        if not least:
            return list(widths)
        sure = [probability >= least for probability in confidence(logits)]
        return [width if known else 0 for width, known in zip(widths, sure, strict=True)]

    def _logits(self, growing: Sequence[Growth], level: int) -> torch.Tensor:
        """Runs one pass; returns logits [R, V] of all open nodes."""
        model, device, masked = self.model, self.model.device, self.model.ops.on_device
        states = [self._state(growth.request) for growth in growing]
        moves_on = self._chain and not self.small.hybrid
        if level == 0:  # the tokens committed since the last draft; the last of them is the root
            cycle = len(self.config.widths) + 1  # what a cycle commits always fits
            most = max(cycle, model.ops.prefill_rows // len(growing))
            self.small.catch_up([growth.request for growth in growing], states, most)
            runs = [growth.request.tokens[state.cached :] for growth, state in zip(growing, states, strict=True)]
            rows = TreeBatch.chains(runs, device, masked=masked)
            open_rows = [[len(run) - 1] for run in runs]
            starts = [state.cached for state in states]
        elif moves_on:
            runs = [growth.tokens[-1:] for growth in growing]
            rows = TreeBatch.chains(runs, device, masked=masked)
            open_rows = [[0]] * len(runs)
            starts = [state.cached + len(state.ahead) for state in states]
        else:
            runs = [growth.tokens for growth in growing]
            rows = TreeBatch.of([growth.tree for growth in growing], device, masked=masked)
            open_rows = [growth.open for growth in growing]
            starts = [len(growth.request.tokens) - 1 for growth in growing]  # from the root on
        cache = self.small.cache
        place = cache.batch([state.pages for state in states], starts, final=False, rooted=False)
        hidden_states = model.hidden(rows, cache, place)
        if level == 0 and self.small.hybrid:
            self.small.replay(rows, place, [len(run) - 1 for run in runs])
        for growth, state in zip(growing, states, strict=True):
            if level == 0:
                state.cached = len(growth.request.tokens) - self.small.hybrid
            elif moves_on:
                state.ahead.append(growth.tokens[-1])
        first = accumulate((len(run) for run in runs), initial=0)
        picked = [start + row for start, own in zip(first, open_rows, strict=False) for row in own]
        return model.logits(take_rows(hidden_states, picked))

    def _state(self, request: DraftRequest) -> State:
        if self.small not in request.drafter_states:
            request.drafter_states[self.small] = State(*self.small.begin(request, self.max_nodes))
        return request.drafter_states[self.small]
