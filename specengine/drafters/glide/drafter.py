"""GLIDE with CAPE (Du et al. 2024): a small model whose layers also attend to the target's own cached keys and values.

Drafter layer m reads those of target layer N_T - N_D + m. It drafts greedily, token by token; the less sure it is of a
token, the more siblings that token gets (CAPE).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine._C import MAX_NODES
from specengine.cache.kv_cache import KVCache
from specengine.draft_policy.cost_model import CostModel, costs_of
from specengine.draft_policy.tree_choice import deeper_pays
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.glide.network import GlideNetwork
from specengine.drafters.glide.rows import GlideRows, ResidentGlide
from specengine.drafters.scored_drafter import ScoredDrafter
from specengine.drafters.shipped import open_drafter
from specengine.engine.device.graph_batch import GraphBatch
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.expand_backbone import BackboneExpander, BackboneTrees
from specengine.ops.row_tools import confidence, likeliest, stack_rows
from specengine.ops.weight import Projection
from specengine.utils.spec_string import check_range

# CAPE: siblings beside the greedy token, by its probability: 7 up to 0.3, 5 up to 0.6, 3 up to 0.8, else 1.
THRESHOLDS = (0.3, 0.6, 0.8)
WIDTHS = (8, 6, 4, 2)


@dataclass(frozen=True)
class Config:
    """length: tokens drafted one after another.  cape: give them siblings; without, the draft is a chain.
    cross: attend to the target's cache; without (an ablation) the drafter is an ordinary small model.
    adaptive: stop drafting where the next pass would not pay, and keep the nodes that do (any choice is lossless under
    the rule `match`).  dtype: of the drafter's weights, as the engine's.
    """

    length: int = 4
    cape: bool = True
    cross: bool = True
    adaptive: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_range("length", self.length, 1, (MAX_NODES - 1) // (WIDTHS[0] if self.cape else 1))

    @property
    def widths(self) -> tuple[int, ...]:
        return WIDTHS if self.cape else (1,)


@dataclass
class State:
    """Of one request. cached: its first tokens whose rows are in the drafter's cache as they stay."""

    cached: int = 0
    drafted: ScoredTree | None = None


class Glide(ScoredDrafter):
    """Drafts a chain or a backbone with leaves, with one small pass per level."""

    name = "glide"
    config_type = Config
    config: Config
    takes_path = True
    drafts_on_device = True

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CostModel | None = None) -> None:
        super().__init__(config, path, target)
        if target.tensor_parallel > 1:
            raise ValueError("drafter: glide reads the whole target's cache, of which tensor_parallel leaves a part")
        checkpoint = open_drafter(self.name, path, target)
        self.network = GlideNetwork(checkpoint, target, config.dtype, cross=config.cross)
        check_range("drafter: cape", max(config.widths), 1, self.network.head.rows)
        self._costs = (costs or costs_of(target)) if config.adaptive and not target.ops.resident else None
        self._device, self._prefill_rows = target.device, target.ops.prefill_rows
        self._max_position = target.config.max_position
        self._most = config.length + 2  # tokens that a cycle commits, and the root before them
        self._expanders: dict[tuple[int, int], tuple[BackboneExpander, torch.Tensor]] = {}  # by batch size and levels

    @property
    def projections(self) -> list[Projection]:
        return self.network.projections

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return not self.config.cape

    @property
    def max_nodes(self) -> int:
        return 1 + self.config.length * self.config.widths[0]

    @property
    def page_bytes(self) -> int:
        return self.network.page_bytes

    def attach(self, cache: KVCache) -> None:
        self._attach_once()
        self.network.attach(cache)
        if cache.fixed:  # a captured graph holds on to the tables
            self.network.ensure_positions(self._max_position + self.config.length)

    def observe_prompt(self, request, start: int, hidden_states: HiddenStates) -> None:
        """Reads along, so that the next prompt that begins alike finds it done."""
        self._state(request, cached=start)
        self._catch_up(request, len(request.tokens) - start - len(hidden_states.last))

    def filled(self, request) -> int:
        return request.drafter_state.cached if request.drafter_state else 0

    def observe(self, requests: Sequence, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        for request, tokens in zip(requests, committed, strict=True):
            self._learn(request, tokens)

    def grow(self, requests: Sequence) -> list[ScoredTree]:
        trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        # a prompt of one token is in no cache yet
        able = [i for i, request in enumerate(requests) if len(request.tokens) > 1 and request.draft_limit > 0]
        if able:
            prefix = sum(len(request.tokens) for request in requests) / len(requests)
            best = self._expand(self._backbone([requests[i] for i in able], prefix))
            before = best.scores.gather(1, best.parents.clamp(min=0).long())
            columns = (self.network.target_ids(best.tokens), best.parents, (best.scores - before).exp_())
            for i, *tree in zip(able, *(column.tolist() for column in columns), strict=True):
                trees[i] = ScoredTree(*tree).rooted(requests[i].tokens[-1], requests[i].draft_limit)
        return trees

    def _backbone(self, requests: Sequence, prefix: float) -> list[torch.Tensor]:
        """Logits [B, Vd] of every level; the likeliest token of each is what the next one continues."""
        begin, deepest = time.perf_counter(), min(self.config.length, max(s.draft_limit for s in requests))
        reach, expected = [1.0] * len(requests), [1.0] * len(requests)
        logits = [self._first_logits(requests)]
        while (levels := len(logits)) < deepest:
            if self._costs is not None:
                sure = confidence(logits[-1])
                reach = [before * chance for before, chance in zip(reach, self._calibration(sure), strict=True)]
                expected = [tokens + chance for tokens, chance in zip(expected, reach, strict=True)]
                spent = time.perf_counter() - begin
                seconds = self._costs(len(requests) * (1 + levels), prefix) + spent
                if not deeper_pays(reach, expected, levels, seconds, spent / levels):
                    break
            best = torch.tensor([token for (token,) in likeliest(logits[-1], 1)], dtype=torch.int32)
            tokens = self.network.target_ids(best.to(self._device)).tolist()
            starts = [len(request.tokens) - 1 + levels for request in requests]
            logits.append(self.network.logits(self._rows(requests, [[token] for token in tokens], starts)))
        return logits

    def _expand(self, logits: Sequence[torch.Tensor]) -> BackboneTrees:
        """Trees whose root is still to be set, in the drafter's tokens, of the logits [B, Vd] of every level."""
        batch, size = logits[0].shape
        rows = stack_rows(logits).view(len(logits), batch, size).transpose(0, 1).contiguous()
        key = (batch, len(logits))
        if key not in self._expanders:
            thresholds = THRESHOLDS if self.config.cape else ()
            roots = torch.zeros(batch, dtype=torch.int32, device=rows.device)
            expander = BackboneExpander(*key, size, self.config.widths, thresholds, rows.device)
            self._expanders[key] = (expander, roots)
        expander, roots = self._expanders[key]
        return expander(rows, roots)

    def _first_logits(self, requests: Sequence) -> torch.Tensor:
        """One pass over what was committed since the last draft; its last token is the root."""
        for request in requests:
            self._catch_up(request, max(self._most, self._prefill_rows // len(requests)))
        starts = [request.drafter_state.cached for request in requests]
        runs = [request.tokens[start:] for request, start in zip(requests, starts, strict=True)]
        logits = self.network.logits(self._rows(requests, runs, starts))
        for request in requests:
            request.drafter_state.cached = len(request.tokens) - 1  # the root is passed again with the target's keys
        return logits

    def _catch_up(self, request, most: int) -> None:
        """Passes what is more than one pass of the batch should hold: prompts."""
        state, step = self._state(request), self._prefill_rows
        while (waiting := len(request.tokens) - state.cached) > most:
            run = request.tokens[state.cached : state.cached + min(step, waiting - most)]
            self.network.states(self._rows([request], [run], [state.cached]))
            state.cached += len(run)

    def _state(self, request, cached: int = 0) -> State:
        if request.drafter_state is None:
            request.drafter_state = State(cached)
            if not self.network.cache.fixed:
                self.network.ensure_positions(request.prompt_length + request.limit + self.config.length)
        return request.drafter_state

    def _rows(self, requests: Sequence, runs: list[list[int]], starts: list[int]) -> GlideRows:
        place = self.network.cache.batch([request.pages for request in requests], starts)
        return GlideRows.of(runs, place, [len(request.tokens) - 1 for request in requests], self._device)

    def new_device_state(self, slots: int) -> ResidentGlide:
        return ResidentGlide(slots, self._most, self._device)

    def load(self, state: ResidentGlide, requests: Sequence) -> None:
        for slot, request in enumerate(requests):
            self._catch_up(request, self._most)
            state.first[slot] = request.drafter_state.cached

    def unload(self, state: ResidentGlide, requests: Sequence) -> None:
        for request, cached in zip(requests, state.first.tolist(), strict=False):
            request.drafter_state.cached = cached

    def draft_on_device(self, slots: GraphBatch) -> TreeBatch:
        state, network, history = slots.drafter_state, self.network, slots.history
        logits = [network.logits(state.committed(slots))]
        while len(logits) < self.config.length:
            tokens = network.target_ids(logits[-1].argmax(-1).int())
            logits.append(network.logits(state.drafted(slots, tokens, len(logits))))
        state.advance(slots)
        best = self._expand(logits)
        tokens = network.target_ids(best.tokens)
        tokens[:, :1] = history.tokens.gather(1, history.length[:, None].long() - 1)
        limits = torch.where(state.running(slots), self.config.length, 0).int()
        return slots.selected(tokens, best.parents, best.depths, best.scores, limits)
