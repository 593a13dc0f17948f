"""FastEagle: N cascaded layers guess N tokens from one pass over the target's hidden states (sections 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine._C import MAX_NODES
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import TreeBatch
from specengine.draft_trees.tree_shape import TreeShape
from specengine.drafters.backbone_expanders import BackboneExpanders, scored_trees
from specengine.drafters.base import Drafter
from specengine.drafters.calibrated_trees import CalibratedTrees
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.growth import Growth
from specengine.drafters.distributions.level_logits import LevelLogits
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.fasteagle.checkpoint import load_cascade
from specengine.drafters.fasteagle.native_draft import CascadeDraft
from specengine.drafters.fasteagle.network import Cascade
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.drafters.hidden_states.reads_pairs import ReadsPairs
from specengine.drafters.policies import policy_of
from specengine.drafters.root_tokens import root_trees
from specengine.drafters.shipped import open_drafter
from specengine.models.transformer import Transformer
from specengine.ops.row_tools import take_rows
from specengine.rules.base import Wants
from specengine.utils.spec_string import check_range

READINGS = ("text", "formula")


@dataclass(frozen=True)
class Config:
    """The options.

    top_k: nodes per level; the first one has children (k = 1: a chain).  levels: of the tree; 0: all there are.
    reading: of the paper's tree size: `text` (levels x top_k and the root) or `formula` (1 + (levels - 1) x top_k).
    adaptive: keep the nodes that pay, otherwise the whole tree.  dtype: of the drafter's weights, as the engine's.
    sample: draw the children from the drafter's distribution, for rules that read it.
    """

    top_k: int = 4
    levels: int = 0
    reading: str = "text"
    adaptive: bool = True
    dtype: str = "auto"
    sample: bool = False

    def __post_init__(self) -> None:
        check_range("top_k", self.top_k, 1, MAX_NODES - 1)
        check_range("levels", self.levels, 0, MAX_NODES - 1)
        if self.reading not in READINGS:
            raise ValueError(f"reading: expected {' or '.join(READINGS)}, got {self.reading!r}")


class FastEagle(ReadsPairs, Drafter):
    """Drafts a tree with one pass of its layers; the siblings of a backbone node are leaves."""

    name = "fasteagle"
    config_type = Config
    config: Config
    takes_path = True
    offers = frozenset(Wants)

    def __init__(self, config: Config, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        checkpoint = open_drafter(self.name, path, target)
        self.network = network = Cascade(load_cascade(checkpoint, target, config.dtype, config.levels), target)
        levels = network.levels - (config.reading == "formula")
        check_range("levels", levels, 1, MAX_NODES - 1)
        check_range("top_k", config.top_k, 1, min(network.head.rows, (MAX_NODES - 1) // levels))
        self.levels = levels
        self.hidden_state_layers = network.hidden_state_layers
        self.logits_device, self.samples = target.device, config.sample
        self.columns = Columns.of(network.vocabulary, network.head.rows, target.config.vocab_size, target.device)
        self.shape = TreeShape.backbone(levels, config.top_k)
        self.calibrated = CalibratedTrees(self.name)
        self.policy = policy_of(self, target, None, [self])
        self.pairs = PairReader(
            self.name,
            network,
            target,
            hidden_state_layers=len(network.hidden_state_layers),
            levels=levels,
            beyond=0,
        )
        self._expanders = BackboneExpanders([config.top_k])
        self._native = network.native_draft(config.top_k)

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return self.config.top_k == 1

    @property
    def max_nodes(self) -> int:
        return 1 + self.config.top_k * self.levels

    def grow(self, requests: Sequence[DraftRequest], min_gain: float = 0.0) -> list[ScoredTree]:
        if self._native:
            return self._backbones(requests, self._native)
        read, place = self.pairs.take_all(requests)
        outputs = self.network.outputs(read, place, self.pairs.pool)
        trees = self._expanders(self.network.logits(outputs, self.levels))
        return scored_trees(trees, requests, self.network.target_ids)

    def begin_levels(self, trees: Sequence[Growth]) -> LevelLogits:
        read, place = self.pairs.take_all([tree.request for tree in trees])
        logits = self.network.lone_logits(self.network.outputs(read, place, self.pairs.pool))
        slots = [tree.slot for tree in trees]

        def level_logits(growing: Sequence[Growth], level: int) -> torch.Tensor:
            rows = take_rows(logits[:, level], [slots.index(tree.slot) for tree in growing])
            if level:
                tokens = [tree.tokens[node] for tree in growing for node in tree.open]  # one of each: a backbone
                above = self.columns.of_tokens(tokens)
                self.network.follow(rows, torch.tensor(above, dtype=torch.int32, device=rows.device))
            return rows

        return level_logits

    @property
    def device_rows(self) -> int:
        return 1 + self.levels  # unread pairs

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        levels = min(self.levels, batch.nodes - 1)
        if not levels:
            return root_trees(batch)
        waiting = batch.drafter_state.rows(batch)
        outputs = self.network.outputs(waiting.pairs, waiting.place, self.pairs.pool)  # the cache needs every layer
        logits = self.network.logits(outputs, levels)
        trees = self._expanders(logits, waiting.roots.view(-1), self.network.vocabulary)
        # Without a pair nothing is drafted.
        return batch.selected(trees.tokens, trees.parents, trees.depths, trees.scores, waiting.counts, levels)

    def _backbones(self, requests: Sequence[DraftRequest], draft: CascadeDraft) -> list[ScoredTree]:
        """Returns backbones with leaves, by one call of the core."""
        unread = self.pairs.take_unread(requests)
        limits = [s.draft_limit for s in requests]
        pages = [s.pages for s in requests]
        return draft(unread, pages, self.pairs.pool, self.network.cos_sin, limits, min(self.levels, max(limits)))
