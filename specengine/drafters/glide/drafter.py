"""GLIDE with CAPE (Du et al. 2024): a small model whose layers also attend to the target's own cached keys and values.

Drafter layer m reads those of target layer N_T - N_D + m. It drafts greedily, token by token. The less sure it is of a
token, the more siblings that token gets (CAPE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine.cache.kv_cache import KVCache
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.draft_trees.tree_shape import TreeShape
from specengine.drafters.backbone_expanders import BackboneExpanders, scored_trees
from specengine.drafters.calibrated_trees import CalibratedTrees
from specengine.drafters.capabilities import (
    CacheCompanion,
    DeviceStateDrafter,
    NetworkDrafter,
    PromptObserver,
    ScoredDrafter,
)
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.growth import Growth
from specengine.drafters.distributions.level_logits import LevelDistributions, LevelLogits
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.glide.config import Config
from specengine.drafters.glide.device_state import DeviceState
from specengine.drafters.glide.network import GlideNetwork
from specengine.drafters.glide.rows import GlideRows, PassRows
from specengine.drafters.native import beam_shape
from specengine.drafters.one_engine import OneEngine
from specengine.drafters.policies import charged, policy_of
from specengine.drafters.root_tokens import root_trees
from specengine.drafters.shipped import open_drafter
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.expand_backbone import BackboneTrees
from specengine.ops.growth.level_trees import Cape, GrowingTrees, GrowthPlan
from specengine.ops.row_tools import confidence, likeliest, stack_rows
from specengine.ops.weight import Projection
from specengine.rules.base import Wants
from specengine.utils.spec_string import check_range


@dataclass
class State:
    """What the drafter remembers of one request.

    cached: its first tokens whose rows in the drafter's cache are final.  drafted: the last draft, before it was cut.
    """

    cached: int = 0
    drafted: ScoredTree | None = None


class Glide(
    Drafter, PromptObserver, CacheCompanion, ScoredDrafter, LevelDistributions, NetworkDrafter, DeviceStateDrafter
):
    """Drafts a chain or a backbone with leaves, with one small pass per level."""

    name = "glide"
    config_type = Config
    config: Config
    takes_path = True
    offers = frozenset(Wants)

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        if target.tensor_parallel > 1:
            raise ValueError("drafter: glide reads the whole target's cache, of which tensor_parallel leaves a part")
        checkpoint = open_drafter(self.name, path, target)
        self.network = GlideNetwork(checkpoint, target, config.dtype, cross=config.cross)
        rows = self.network.head.rows
        check_range("drafter: cape", max(config.widths), 1, rows)
        self.logits_device, self.samples = target.device, config.sample
        self.columns = Columns.of(self.network.vocabulary, rows, target.config.vocab_size, target.device)
        self.shape = TreeShape.backbone(config.length, config.widths[0])
        self.calibrated = CalibratedTrees(self.name)
        self.policy = policy_of(self, target, costs, [self])
        self._engine = OneEngine(self.name)
        self._device, self._prefill_rows = target.device, target.ops.prefill_rows
        self._masked = target.ops.on_device
        self._max_position = target.config.max_position
        self._most = config.length + 2  # tokens that a cycle commits, and the root before them
        self._expanders = BackboneExpanders(config.widths, config.thresholds)
        self._cape = Cape.of(config.widths, config.thresholds, target.device)
        self._plans: dict[tuple[int, int], GrowthPlan] = {}  # by slots and levels
        self._native = self.network.native_draft(
            beam_shape(config.widths[0], widths=config.widths, thresholds=config.thresholds)
        )

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
        self._engine.claim()
        self.network.attach(cache)
        if cache.fixed:  # captured graphs hold on to the rotary tables
            self.network.ensure_positions(self._max_position + self.config.length)

    def filled(self, request: DraftRequest) -> int:
        return request.drafter_state.cached if request.drafter_state else 0

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        """Reads the chunk at once, so that the next prompt that begins alike finds it cached."""
        if request.drafter_reads:
            with charged(self.policy, 0, len(hidden_states)):
                self._state(request, cached=start)
                self._catch_up(request, len(request.tokens) - start - len(hidden_states))

    def reads(self, tokens: int, answer: int, batch: int) -> bool:
        return self.policy.reads(0, tokens, answer, batch)

    def ready(self, requests: Sequence[DraftRequest]) -> int:
        return sum(request.drafter_reads for request in requests)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return self.policy.draft(requests).trees if requests else []

    def observe(
        self, requests: Sequence[DraftRequest], committed: Sequence[list[int]], hidden_states: HiddenStates | None
    ) -> None:
        for request, tokens in zip(requests, committed, strict=True):
            self.calibrated.learn(request, tokens)
        self.policy.observe(requests, committed)

    def propose(self, requests: Sequence[DraftRequest], least_tokens: float) -> list[ScoredTree]:
        trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        if able := [i for i, request in enumerate(requests) if self._drafts_for(request)]:
            drafted = [requests[i] for i in able]
            for i, tree in zip(able, self._grown(drafted, least_tokens), strict=True):
                trees[i] = tree
        return self.calibrated.calibrate(requests, trees)

    def skip(self, requests: Sequence[DraftRequest]) -> None:
        self.calibrated.forget(requests)

    @property
    def learned(self) -> list[list[float]]:
        return self.calibrated.learned

    def levels_for(self, request: DraftRequest) -> int:
        return request.draft_limit if self._drafts_for(request) else 0

    def begin_levels(self, trees: Sequence[Growth]) -> LevelLogits:
        return self._level_logits

    def most_children(self, logits: torch.Tensor, widths: Sequence[int]) -> list[int]:
        """Returns as many as each row's class has (CAPE)."""
        return [self.config.width_of(probability) for probability in confidence(logits)]

    def _level_logits(self, growing: Sequence[Growth], level: int) -> torch.Tensor:
        """Returns the logits [B, Vd] of the trees' open nodes, one of each: a backbone."""
        requests = [tree.request for tree in growing]
        if level == 0:
            return self._first_logits(requests)
        starts = [len(request.tokens) - 1 + level for request in requests]
        tokens = [[tree.tokens[node] for node in tree.open] for tree in growing]
        return self.network.logits(self._rows(requests, tokens, starts))

    def _grown(self, requests: Sequence[DraftRequest], least_tokens: float) -> list[ScoredTree]:
        """Returns every request's tree, with the drafter's own chances. Every request has at least two tokens."""
        if self._native is None:
            return scored_trees(self._expand(self._backbone(requests)), requests, self.network.target_ids)
        runs, starts = self._unread(requests)
        limits = [s.draft_limit for s in requests]
        place = ([s.pages for s in requests], starts, self.network.native_caches, limits)
        trees, _ = self._native(runs, None, (), *place, min(self.config.length, max(limits)), least_tokens)
        for request in requests:
            request.drafter_state.cached = len(request.tokens) - 1  # the root is passed again, see _first_logits
        return trees

    def _drafts_for(self, request: DraftRequest) -> bool:
        # A prompt of one token is in no cache yet.
        return request.drafter_reads and len(request.tokens) > 1 and request.draft_limit > 0

    def _backbone(self, requests: Sequence[DraftRequest]) -> list[torch.Tensor]:
        """Returns the logits [B, Vd] of every level; the next level continues the likeliest token of each."""
        deepest = min(self.config.length, max(s.draft_limit for s in requests))
        logits = [self._first_logits(requests)]
        while (levels := len(logits)) < deepest:
            best = torch.tensor([token for (token,) in likeliest(logits[-1], 1)], dtype=torch.int32)
            tokens = self.network.target_ids(best.to(self._device)).tolist()
            starts = [len(request.tokens) - 1 + levels for request in requests]
            logits.append(self.network.logits(self._rows(requests, [[token] for token in tokens], starts)))
        return logits

    def _expand(self, logits: Sequence[torch.Tensor]) -> BackboneTrees:
        """Returns trees in the drafter's tokens, of the logits [B, Vd] of every level."""
        batch, size = logits[0].shape
        return self._expanders(stack_rows(logits).view(len(logits), batch, size).transpose(0, 1).contiguous())

    def _first_logits(self, requests: Sequence[DraftRequest]) -> torch.Tensor:
        """Passes the tokens committed since the last draft; the last of them is the root."""
        runs, starts = self._unread(requests)
        logits = self.network.logits(self._rows(requests, runs, starts))
        for request in requests:
            # The root is passed again once the target has cached its keys.
            request.drafter_state.cached = len(request.tokens) - 1
        return logits

    def _unread(self, requests: Sequence[DraftRequest]) -> tuple[list[list[int]], list[int]]:
        """Returns the tokens of every request that are not cached, few enough for one pass, and where they begin."""
        for request in requests:
            self._catch_up(request, max(self._most, self._prefill_rows // len(requests)))
        starts = [request.drafter_state.cached for request in requests]
        return [request.tokens[start:] for request, start in zip(requests, starts, strict=True)], starts

    def _catch_up(self, request: DraftRequest, most: int) -> None:
        """Passes tokens until at most `most` are left: a prompt is more than one pass should hold."""
        state = self._state(request)
        while (waiting := len(request.tokens) - state.cached) > most:
            run = request.tokens[state.cached : state.cached + min(self._prefill_rows, waiting - most)]
            self.network.states(self._rows([request], [run], [state.cached]))
            state.cached += len(run)

    def _state(self, request: DraftRequest, cached: int = 0) -> State:
        if request.drafter_state is None:
            request.drafter_state = State(cached)
            if not self.network.cache.fixed:
                self.network.ensure_positions(request.prompt_length + request.limit + self.config.length)
        return request.drafter_state

    def _rows(self, requests: Sequence[DraftRequest], runs: list[list[int]], starts: list[int]) -> PassRows:
        place = self.network.cache.batch([request.pages for request in requests], starts)
        verified = [len(request.tokens) - 1 for request in requests]
        return GlideRows.of(runs, place, verified, self._device, self._masked).read(self.network.block)

    def new_device_state(self, slots: int) -> DeviceState:
        return DeviceState(slots, self._most, self.network.block, self._device)

    @property
    def device_rows(self) -> int:
        return self._most

    def load(self, state: DeviceState, slot: int, request: DraftRequest) -> None:
        self._catch_up(request, self._most)
        cached = self._state(request).cached
        state.first[slot] = cached
        state.backlog.waiting = max(state.backlog.waiting, len(request.tokens) - cached)

    def unload(self, state: DeviceState, slot: int, request: DraftRequest | None) -> None:
        if request:
            self._state(request).cached = int(state.first[slot])
        state.first[slot] = 0

    def before_cycle(self, batch: DraftBatch) -> None:
        state = batch.drafter_state
        if state.backlog.is_late(batch.nodes):
            self.network.states(state.late(batch))

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        state, network = batch.drafter_state, self.network
        levels = min(self.config.length, batch.nodes - 1)
        if not levels:
            return root_trees(batch)  # a later draft finds the token in the history
        text = state.committed(batch)
        trees = GrowingTrees(self._plan(batch.size, levels), text.roots, text.running, network.vocabulary)
        read: PassRows | None = state.read(batch, text)
        while read is not None:
            grown = trees.expand(network.logits(read), cape=self._cape)
            read = None if grown is None else state.drafted(batch, text, grown)
        return batch.selected(*trees.columns, text.running, levels)

    def _plan(self, batch: int, levels: int) -> GrowthPlan:
        """Returns the plan of a batch's trees on the device: the likeliest node of a level has children."""
        key = (batch, levels)
        if key not in self._plans:
            words = -(-(1 + levels) // 32)
            self._plans[key] = GrowthPlan.of(batch, levels, self.config.widths[0], 1, words, self._device)
        return self._plans[key]
