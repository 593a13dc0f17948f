"""PARD and PARD-2 (An et al. 2025): a small model drafts several tokens in one pass, from mask tokens.

PARD-2 adds the target's hidden states to the embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.cache.cache_batch import CacheBatch
from specengine.cache.kv_cache import KVCache
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.rank_paths import RankCandidates, RankTree
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import TreeBatch
from specengine.draft_trees.tree_shape import TreeShape
from specengine.drafters.backbone_expanders import BackboneExpanders
from specengine.drafters.base import Drafter
from specengine.drafters.calibrated_trees import CalibratedTrees
from specengine.drafters.capabilities import (
    CacheCompanion,
    DeviceStateDrafter,
    HiddenStateReader,
    NetworkDrafter,
    ScoredDrafter,
    TokenizerChecker,
)
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.growth import Growth
from specengine.drafters.distributions.level_logits import LevelDistributions, LevelLogits
from specengine.drafters.draft_model.small_model import SmallModel
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.one_pass.slot_trees import SlotTrees, slot_logits
from specengine.drafters.pard.checkpoint import PardCheckpoint
from specengine.drafters.pard.config import Config
from specengine.drafters.pard.network import PardNetwork
from specengine.drafters.pard.row_reader import RowReader
from specengine.drafters.policies import charged, policy_of
from specengine.drafters.root_tokens import root_trees
from specengine.drafters.text_state import TextState
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.growth.fill_ranks import fill_ranks
from specengine.ops.row_tools import take_rows
from specengine.ops.weight import Projection
from specengine.rules.base import Wants
from specengine.tokenizer import Tokenizer


class Pard(
    Drafter,
    HiddenStateReader,
    CacheCompanion,
    ScoredDrafter,
    LevelDistributions,
    NetworkDrafter,
    TokenizerChecker,
    DeviceStateDrafter,
):
    """Drafts the tokens of all levels in one pass; no level knows which token the level above it got.

    Captured cycles draft chains without features.

    costs: of cycles; by default learned from them.
    """

    name = "pard"
    config_type = Config
    config: Config
    takes_path = True
    offers = frozenset(Wants)

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        checkpoint = PardCheckpoint.open(path)
        self._model = SmallModel(self.name, 0, config.dtype, path, target)
        model = self._model.model
        self._features = None
        if config.features and checkpoint.reads_features:
            self._features = checkpoint.features(model.config.hidden_size, target, config.dtype)
            self.hidden_state_layers = self._features.hidden_state_layers
        self.reads_hidden_states = self._features is not None
        self.network = PardNetwork(model, self.reads_hidden_states)
        self._rows = RowReader(self.name, self.network, checkpoint.mask_token, self._features, target)
        self._trees = SlotTrees(config, model.config.vocab_size, None)
        self.logits_device, self.samples = target.device, config.sample
        self.columns = Columns.of(None, model.config.vocab_size, target.config.vocab_size, target.device)
        self.shape = TreeShape.backbone(*config.drawn)
        self._mask_token, self._positions = checkpoint.mask_token, target.config.max_position
        self.drafts_in_cycle = config.tree == "chain" and self._features is None
        self._chain = RankCandidates(RankTree.of([[0] * level for level in range(1, config.length + 1)]), target.device)
        self._expanders = BackboneExpanders([1])
        self.calibrated = CalibratedTrees(self.name)
        self.policy = policy_of(self, target, costs, [self])

    @property
    def projections(self) -> list[Projection]:
        own = [self._features.projection] if self._features else []
        return [*self.network.projections, *own]

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return self._trees.ranks == 1

    @property
    def max_nodes(self) -> int:
        return self.config.most_nodes

    @property
    def spare_slots(self) -> int:
        return max(self.max_nodes, self.config.length)  # those of the mask tokens too

    @property
    def page_bytes(self) -> int:
        return self._rows.page_bytes

    def attach(self, cache: KVCache) -> None:
        self._rows.attach(cache)
        if cache.fixed and self.drafts_in_cycle:  # captured graphs hold on to the rotary tables
            self.network.ensure_positions(self._positions + self.config.length)

    def filled(self, request: DraftRequest) -> int:
        return self._rows.filled(request)

    def reads(self, tokens: int, answer: int, batch: int) -> bool:
        return self.policy.reads(0, tokens, answer, batch)

    def ready(self, requests: Sequence[DraftRequest]) -> int:
        return sum(request.drafter_reads for request in requests)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._model.check_tokenizer(tokenizer)

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        if request.drafter_reads:
            with charged(self.policy, 0, len(hidden_states)):
                self._rows.observe_prompt(request, start, hidden_states)

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft(requests)

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        self._rows.observe(draft.requests, committed, hidden_states)
        for request, tokens in zip(draft.requests, committed, strict=True):
            self.calibrated.learn(request, tokens)
        self.policy.observe(draft, committed)

    def propose(self, requests: Sequence[DraftRequest], min_gain: float) -> list[ScoredTree]:
        trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        if able := [i for i, s in enumerate(requests) if s.draft_limit > 0 and self._rows.can_draft(s)]:
            drafted = [requests[i] for i in able]
            levels = min(self.config.length, max(request.draft_limit for request in drafted))
            for i, tree in zip(able, self._trees(drafted, self._logits(drafted, levels)), strict=True):
                trees[i] = tree
        return self.calibrated.calibrate(requests, trees)

    def levels_for(self, request: DraftRequest) -> int:
        return min(request.draft_limit, self.shape.levels) if self._rows.can_draft(request) else 0

    def begin_levels(self, trees: Sequence[Growth]) -> LevelLogits:
        levels = max(tree.depth for tree in trees)
        return slot_logits(trees, self._logits([tree.request for tree in trees], levels))

    def drafted_levels(self, trees: Sequence[ScoredTree]) -> int:
        return 1  # one pass, however many levels it drafts

    def skip(self, requests: Sequence[DraftRequest]) -> None:
        self.calibrated.forget(requests)
        self._rows.skip(requests)

    @property
    def learned(self) -> list[list[float]]:
        return self.calibrated.learned

    @property
    def device_rows(self) -> int:
        return 2 * self.config.length + 1  # what a cycle commits and the root, then masks

    def new_device_state(self, slots: int) -> TextState:
        length = self.config.length
        return TextState(slots, length + 2, self.logits_device, masks=length - 1)

    def load(self, state: TextState, slot: int, request: DraftRequest) -> None:
        cached = self._rows.cached_behind(request, state.backlog.most)
        state.count(slot, cached, len(request.tokens) - cached)

    def unload(self, state: TextState, slot: int, request: DraftRequest | None) -> None:
        if request:
            self._rows.take_back(request, int(state.first[slot]))
        state.first[slot] = 0

    def before_cycle(self, batch: DraftBatch) -> None:
        state, table = batch.drafter_state, batch.cache.block_table
        if state.backlog.is_late(batch.nodes):
            text = state.late(batch, table)
            self.network.cache(text.rows, None, CacheBatch(table, text.first), self._rows.pool)

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        levels, table = min(self.config.length, batch.nodes - 1), batch.cache.block_table
        if not levels:
            return root_trees(batch)  # a later draft finds the token in the history
        text = batch.drafter_state.committed(batch, table, levels - 1, self._mask_token)
        hidden = self.network.hidden(text.rows, None, CacheBatch(table, text.first), self._rows.pool)
        best = self._expanders(self.network.logits(take_rows(hidden, text.last))[:, None])
        columns = fill_ranks(best, None, self._chain.columns(levels), batch.history, by_request=True)
        return batch.selected(*columns, text.running, levels)

    def _logits(self, requests: Sequence[DraftRequest], levels: int) -> torch.Tensor:
        """Returns float32 [B, levels, V], by one pass."""
        hidden_states = self._rows.draft(requests, levels)
        return self.network.logits(hidden_states.flatten(0, 1)).view(len(requests), levels, -1)
