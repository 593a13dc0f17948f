"""DFlash, JetSpec, DSpark and Domino as drafters: one pass over a block of mask tokens drafts all levels.

A draft first reads the target's hidden states that the last cycle made known. Their keys and values stay; those of the
block are overwritten by the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.rank_paths import RankCandidates, RankTree
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import TreeBatch
from specengine.draft_trees.tree_shape import TreeShape
from specengine.drafters.base import Drafter
from specengine.drafters.block.checkpoint import LoadedBlock, load_block
from specengine.drafters.block.config import BlockConfig
from specengine.drafters.block.gguf import open_gguf
from specengine.drafters.block.head import OpenDraft
from specengine.drafters.block.level_logits import BlockLevels
from specengine.drafters.block.level_trees import best_trees, chain_tree, draft_chains, grow_captured, grow_levels
from specengine.drafters.block.path_trees import path_trees
from specengine.drafters.calibrated_trees import CalibratedTrees
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.growth import Growth
from specengine.drafters.distributions.level_logits import LevelLogits
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.drafters.hidden_states.reads_pairs import ReadsPairs
from specengine.drafters.policies import policy_of
from specengine.drafters.root_tokens import root_trees
from specengine.drafters.shipped import open_drafter
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer
from specengine.ops.growth.fill_ranks import fill_ranks
from specengine.ops.growth.level_trees import GrowthPlan
from specengine.ops.row_tools import FixedRows
from specengine.ops.weight import Projection
from specengine.rules.base import Wants


def _open(name: str, path: str | None, target: Transformer) -> DraftCheckpoint:
    if path is not None and Path(path).suffix.lower() == ".gguf":
        return open_gguf(Path(path))
    return open_drafter(name, path, target)


class BlockDrafter(ReadsPairs, Drafter):
    """Drafts by one pass over a block. families: of checkpoints that the name stands for."""

    config_type = BlockConfig
    config: BlockConfig
    takes_path = True
    offers = frozenset(Wants)
    families: ClassVar[tuple[str, ...]]

    def __init__(self, config: BlockConfig, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        checkpoint = _open(self.name, path, target)
        loaded = load_block(checkpoint, target, config.dtype)
        if (problem := self._misnamed(loaded)) is not None:
            raise checkpoint.error(problem)
        self.settings, self.network, self.head = loaded.settings, loaded.backbone, loaded.head
        self.levels = loaded.settings.levels
        self.hidden_state_layers = loaded.backbone.hidden_state_layers
        if config.threshold and not self.head.estimates:
            raise checkpoint.error(f"has no confidence head, which threshold={config.threshold} asks for")
        self._device = target.device
        self.drafts_in_cycle = config.tree in ("", "chain")  # other trees grow node by node on the host
        grows = target.ops.on_device or self.head.reads_path
        self._by_levels = config.tree == "chain" or (grows and not config.tree)
        most = 1 if config.tree == "chain" else config.nodes - 1 if config.tree == "ddtree" else config.top_k
        self._children = min(most, self.head.most_children)
        self._drafted_levels = 0  # of the last draft
        self._growing: BlockLevels | None = None  # the last drawn trees
        self._plans: dict[tuple[int, int], GrowthPlan] = {}  # by slots and levels
        self._fixed = FixedRows()
        chain = RankTree.of([[0] * depth for depth in range(1, self.levels + 1)]) if self.drafts_chains else None
        self._chain = RankCandidates(chain, target.device) if chain else None
        vocabulary = self.head.vocabulary
        # Heads that read the path read slots too, exactly.
        lone = not self.head.reads_path
        self._slot_dtype = target.ops.layer.dtype_for(vocabulary.head) if lone else torch.float32
        self.logits_device, self.samples = target.device, config.sample
        self.columns = Columns.of(vocabulary.tokens, vocabulary.head.rows, target.config.vocab_size, target.device)
        width = 1 if config.tree == "chain" else min(config.top_k, self.head.most_children)
        drawn = min(self.levels, self.max_nodes - 1)  # levels of drawn trees
        self.shape = TreeShape.backbone(drawn, min(width, (self.max_nodes - 1) // drawn))
        self.calibrated = CalibratedTrees(self.name)
        self.policy = policy_of(self, target, None, [self])
        self.pairs = PairReader(
            self.name,
            self.network,
            target,
            hidden_state_layers=len(self.hidden_state_layers),
            levels=self.levels,
            beyond=self.settings.block_size,
        )

    def _misnamed(self, loaded: LoadedBlock) -> str | None:
        """Returns why the checkpoint is not what the drafter's name says, or None."""
        if loaded.settings.family in self.families:
            return None
        return f"is a {loaded.settings.family} drafter; use {loaded.settings.family}:PATH"

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return self.config.tree == "chain"

    @property
    def max_nodes(self) -> int:
        return 1 + self.levels if self.drafts_chains else self.config.nodes

    @property
    def spare_slots(self) -> int:
        return max(self.max_nodes, self.settings.block_size)

    @property
    def projections(self) -> list[Projection]:
        return [*self.network.projections, *self.head.projections]

    def propose(self, requests: Sequence[DraftRequest], min_gain: float) -> list[ScoredTree]:
        self._drafted_levels = 0
        return super().propose(requests, min_gain)

    def drafted_levels(self, trees: Sequence[ScoredTree]) -> int:
        return self._drafted_levels

    def grow(self, requests: Sequence[DraftRequest], min_gain: float = 0.0) -> list[ScoredTree]:
        limits = [min(self.levels, request.draft_limit) for request in requests]
        levels = max(limits)
        tokens = [request.tokens[-1] for request in requests]
        draft, roots = self._read(requests, levels)
        self._drafted_levels = levels if self.head.reads_path else 1  # one pass has all levels
        if self.drafts_chains:
            drafted = zip(tokens, limits, draft_chains(draft, roots, levels), strict=True)
            return [
                chain_tree(root, own[:limit], chances[:limit], self.config.threshold)
                for root, limit, (own, chances) in drafted
            ]
        if not self._by_levels:
            return path_trees(self.config, draft, roots, limits, self.head.reads_path)
        trees = grow_levels(draft, roots, levels, self._beam, min_gain)
        self._drafted_levels = len(trees.ends)
        return best_trees(trees, roots, limits, self.max_nodes)

    def begin_levels(self, trees: Sequence[Growth]) -> LevelLogits:
        levels = min(self.levels, max(tree.depth for tree in trees))
        self._growing = BlockLevels(self._read([tree.request for tree in trees], levels)[0], trees, self._device)
        return self._growing

    def most_children(self, logits: torch.Tensor, widths: Sequence[int]) -> list[int]:
        """Returns none for a row of less confidence than the threshold. The confidence reads no drawn child."""
        if not self.config.threshold or self._growing is None or self._growing.confidence is None:
            return list(widths)
        kept = (self._growing.confidence >= self.config.threshold).tolist()
        return [width if sure else 0 for width, sure in zip(widths, kept, strict=True)]

    @property
    def device_rows(self) -> int:
        return max(1 + self.levels, self.settings.block_size)  # unread hidden states, or slots

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        levels = min(self.levels, batch.nodes - 1)
        if not levels:
            return root_trees(batch)
        blocks = self.network.block_tokens(batch.size)
        waiting = batch.drafter_state.rows(batch, blocks)
        self.network.cache_pairs(waiting.pairs, waiting.place, self.pairs.pool)
        draft = self._open(blocks, waiting.next, levels)
        token_ids, best = self.head.vocabulary.tokens, draft.all_levels() if self._chain else None
        if self._chain and best is not None:
            trees = fill_ranks(best, token_ids, self._chain.columns(levels), batch.history, by_request=False)
        else:
            trees = grow_captured(draft, self._plan(batch.size, levels), waiting.roots, waiting.counts, token_ids)
        tokens, parents, depths, scores = trees
        if self.config.threshold:  # of a chain, whose scores add up the logarithms of chances
            sure = (scores[:, 1:] - scores[:, :-1]).exp() >= self.config.threshold
            depths = torch.where(depths > sure.int().cumprod(1).sum(1, keepdim=True), -1, depths)
        # Without hidden states nothing is drafted.
        return batch.selected(tokens, parents, depths, scores, waiting.counts, levels)

    def _plan(self, batch: int, levels: int) -> GrowthPlan:
        """Returns the plan of a batch's trees on the device."""
        key = (batch, levels)
        if key not in self._plans:
            words = -(-(1 + levels * self._beam) // 32)
            self._plans[key] = GrowthPlan.of(batch, levels, self._children, self._beam, words, self._device)
        return self._plans[key]

    @property
    def _beam(self) -> int:
        return min(self.config.beam, self._children)

    def _read(self, requests: Sequence[DraftRequest], levels: int) -> tuple[OpenDraft, torch.Tensor]:
        """Caches what the requests' hidden states give and runs their blocks; returns the draft and roots int32 [B]."""
        roots = torch.tensor([request.tokens[-1] for request in requests], dtype=torch.int32, device=self._device)
        read, place = self.pairs.take_all(requests)
        self.network.cache_pairs(read, place, self.pairs.pool)
        place = self.pairs.place(requests, [own.first for own in self.pairs.of(requests)])
        blocks = self.network.block_tokens(len(requests))
        blocks[:, 0] = roots
        return self._open(blocks, place, levels), roots

    def _open(self, blocks: torch.Tensor, place: CacheBatch, levels: int) -> OpenDraft:
        """Runs blocks, int32 [B, block_size], behind their contexts, which are cached."""
        outputs, first = self.network.outputs(blocks, place, self.pairs.pool), self.settings.first_slot
        batch, size, hidden = outputs.shape
        by_levels = [b * size + first + level for level in range(levels) for b in range(batch)]
        slots = self._fixed.take(outputs.flatten(0, 1), by_levels, self._slot_dtype)
        return self.head.open(slots.view(levels, batch, hidden), self._children)


class DFlash(BlockDrafter):
    """DFlash (arXiv 2602.06036): all slots of a block see each other."""

    name = "dflash"
    families = ("dflash",)

    def _misnamed(self, loaded: LoadedBlock) -> str | None:
        if loaded.settings.family == "dspark" and not loaded.head.reads_path:
            return None  # DeepSpec's files of DFlash are those of DSpark without a second head
        return super()._misnamed(loaded)


class JetSpec(BlockDrafter):
    """JetSpec (arXiv 2606.18394): a slot sees the slots before it."""

    name = "jetspec"
    families = ("dflash",)

    def _misnamed(self, loaded: LoadedBlock) -> str | None:
        if loaded.settings.family == "dflash" and not loaded.settings.causal:
            return "is a drafter whose slots all see each other; use dflash:PATH"
        return super()._misnamed(loaded)


class DSpark(BlockDrafter):
    """DSpark (arXiv 2607.05147): a Markov head reads the token above, and a confidence head estimates chances."""

    name = "dspark"
    families = ("dspark",)


class Domino(BlockDrafter):
    """Domino: a GRU corrects the slots' logits along the drafted path."""

    name = "domino"
    families = ("domino",)
