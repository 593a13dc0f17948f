"""P-EAGLE: EAGLE-3's network drafts several tokens in one pass (vLLM, the speculators library).

The last pair of hidden state and token is followed by masks: a mask token beside a learned state. The outputs of that
pair and of the masks are the distributions of the next tokens. Keys and values of masks lie behind those of pairs until
the next draft overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import TreeBatch
from specengine.draft_trees.tree_shape import TreeShape
from specengine.drafters.base import Drafter
from specengine.drafters.calibrated_trees import CalibratedTrees
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.growth import Growth
from specengine.drafters.distributions.level_logits import LevelLogits
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.drafters.hidden_states.reads_pairs import ReadsPairsOnHost
from specengine.drafters.one_pass.config import OnePassConfig
from specengine.drafters.one_pass.slot_trees import SlotTrees, slot_logits
from specengine.drafters.p_eagle.checkpoint import load_p_eagle
from specengine.drafters.policies import policy_of
from specengine.drafters.shipped import open_drafter
from specengine.models.transformer import Transformer
from specengine.ops.row_tools import stack_rows, take_rows
from specengine.rules.base import Wants


class PEagle(ReadsPairsOnHost, Drafter):
    """Drafts the tokens of all levels in one pass; no level knows which token the level above it got."""

    name = "p_eagle"
    config_type = OnePassConfig
    config: OnePassConfig
    takes_path = True
    offers = frozenset(Wants)

    def __init__(self, config: OnePassConfig, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        if path is None:
            raise ValueError("drafter: p-eagle:PATH takes a P-EAGLE checkpoint")
        loaded = load_p_eagle(open_drafter(self.name, path, target), target, config.dtype)
        self.network, self._mask_token, self._mask_state = loaded.network, loaded.mask_token, loaded.mask_state
        self.hidden_state_layers = loaded.hidden_state_layers
        self._device = self.logits_device = target.device
        self._masked = target.ops.on_device
        columns = loaded.network.head.rows
        self.samples = config.sample
        self.columns = Columns.of(loaded.tokens, columns, target.config.vocab_size, target.device)
        self.shape = TreeShape.backbone(*config.drawn)
        self._trees = SlotTrees(config, columns, loaded.tokens)
        self.calibrated = CalibratedTrees(self.name)
        self.policy = policy_of(self, target, None, [self])
        self.pairs = PairReader(
            self.name,
            self.network,
            target,
            hidden_state_layers=len(loaded.hidden_state_layers),
            levels=config.length,
            beyond=config.length,
        )

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
        return max(self.max_nodes, self.config.length)  # those of masks too

    def drafted_levels(self, trees: Sequence[ScoredTree]) -> int:
        return 1  # one pass, however many levels it drafts

    def grow(self, requests: Sequence[DraftRequest], min_gain: float = 0.0) -> list[ScoredTree]:
        levels = min(self.config.length, max(request.draft_limit for request in requests))
        return self._trees(requests, self._logits(requests, levels))

    def levels_for(self, request: DraftRequest) -> int:
        return min(super().levels_for(request), self.shape.levels)

    def begin_levels(self, trees: Sequence[Growth]) -> LevelLogits:
        levels = max(tree.depth for tree in trees)
        return slot_logits(trees, self._logits([tree.request for tree in trees], levels))

    def _logits(self, requests: Sequence[DraftRequest], levels: int) -> torch.Tensor:
        """Reads every unread pair; returns float32 [B, levels, Vd], by one pass."""
        unread = self.pairs.take_unread(requests)
        pairs = self.network.fuse(take_rows(unread.hidden_states, unread.rows))
        masks, count = levels - 1, len(pairs)
        picked, entering, first, end = list[int](), list[int](), 0, 0
        for tokens in unread.tokens:
            entering += [*range(first, first + len(tokens)), *masks * [count]]
            first, end = first + len(tokens), end + len(tokens) + masks
            picked += range(end - levels, end)
        runs = [[*tokens, *masks * [self._mask_token]] for tokens in unread.tokens]
        rows = TreeBatch.chains(runs, self._device, masked=self._masked)
        states = take_rows(stack_rows([pairs, self._mask_state]), entering)
        place = self.pairs.place(requests, unread.cached)
        outputs = self.network.forward(rows, states, place, self.pairs.pool)
        return self.network.logits(take_rows(outputs.read, picked)).view(len(requests), levels, -1)
