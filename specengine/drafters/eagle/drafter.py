"""EAGLE-1, -2 and -3 as drafters: true hidden states first, then level by level on the network's own outputs.

A draft first reads the pairs of hidden state and token that the last cycle made known. Their keys and values stay.
Those of drafted nodes lie behind them until the next draft overwrites them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import exp

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.dynamic import DynamicTrees
from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.static import StaticTree
from specengine.draft_trees.tree import TreeBatch
from specengine.draft_trees.tree_shape import TreeShape
from specengine.drafters.backbone_expanders import BackboneExpanders
from specengine.drafters.base import Drafter
from specengine.drafters.calibrated_trees import CalibratedTrees
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.growth import Growth
from specengine.drafters.eagle.checkpoint import LoadedEagle, load_eagle1, load_eagle3
from specengine.drafters.eagle.config import EagleConfig
from specengine.drafters.eagle.expanded_rows import Expanded, own_bits
from specengine.drafters.eagle.level_logits import EagleLevels
from specengine.drafters.eagle.network import Outputs
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.drafters.hidden_states.pairs import PairRows
from specengine.drafters.hidden_states.reads_pairs import ReadsPairs
from specengine.drafters.policies import policy_of
from specengine.drafters.root_tokens import root_trees
from specengine.drafters.shipped import open_drafter
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.draft_tree import Thresholds, TreeDraft
from specengine.ops.expand_backbone import BackboneTrees
from specengine.ops.growth.level_trees import GrowingTrees, GrowthPlan
from specengine.ops.row_tools import take_rows
from specengine.ops.select_nodes import SelectedTrees, select_nodes
from specengine.rules.base import Wants
from specengine.utils.spec_string import check_range

RARE = 0.01  # a node that is reached less often is not worth its row


class Eagle(ReadsPairs, Drafter):
    """Drafts the tree of its own confidence (EAGLE-2), with a network that goes on from its own output."""

    config_type = EagleConfig
    config: EagleConfig
    takes_path = True
    offers = frozenset(Wants)

    def __init__(self, config: EagleConfig, path: str | None, target: Transformer) -> None:
        ranks = RankTree.named(config.tree) if config.tree else None
        self._static = StaticTree(ranks, target.device) if ranks else None
        if self._static:
            shape = self._static
            config = replace(config, nodes=shape.nodes, levels=shape.levels, top_k=shape.top_k, beam=0)
        elif config.adaptive and not config.beam and not target.ops.on_device:
            config = replace(config, beam=1)  # rows of the drafter take time on the CPU
        super().__init__(config, path, target)
        loaded = self._open(path, target)
        check_range("top_k", config.top_k, 1, loaded.network.head.rows)
        self.network = loaded.network
        self.hidden_state_layers = loaded.hidden_state_layers
        self._tokens = loaded.tokens
        self._device = self.logits_device = target.device
        self.columns = Columns.of(loaded.tokens, loaded.network.head.rows, target.config.vocab_size, target.device)
        self.shape = TreeShape.of_ranks(ranks) if ranks else TreeShape.backbone(*config.drawn)
        self.samples = config.sample
        self.calibrated = CalibratedTrees(self.name)
        self.policy = policy_of(self, target, None, [self])
        self.pairs = PairReader(
            self.name,
            self.network,
            target,
            hidden_state_layers=len(loaded.hidden_state_layers),
            levels=config.levels,
            beyond=config.levels,
        )
        self._expanders = BackboneExpanders([config.top_k])
        self._own_bits = own_bits(config.expanded).to(target.device)
        self._plans: dict[tuple[int, int], GrowthPlan] = {}  # by slots and levels
        sizes = (config.top_k, config.width, self.max_nodes)
        self._drafted = False  # since the last cycle was observed
        self._levels = 0  # of the last draft
        self._tree_draft = None if self._static else self.network.tree_draft(loaded.tokens, *sizes)

    @abstractmethod
    def _open(self, path: str | None, target: Transformer) -> LoadedEagle:
        """Loads the network of a checkpoint; without a path, of the one that comes with the package."""

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return self.config.top_k == 1

    @property
    def max_nodes(self) -> int:
        return min(self.config.nodes, 1 + self.config.candidates)

    @property
    def device_rows(self) -> int:
        return max(1 + self.config.levels, self.config.width)  # unread pairs, or the expanded nodes of a level

    @property
    def spare_slots(self) -> int:
        return max(self.max_nodes, self.config.expanded)

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        if self._drafted and self._tree_draft:  # the next cycle probably drafts too
            self._drafted = False
            self._tree_draft.fetch()
        super().observe(draft, committed, hidden_states)

    def propose(self, requests: Sequence[DraftRequest], min_gain: float) -> list[ScoredTree]:
        self._levels = 0
        return super().propose(requests, min_gain)

    def drafted_levels(self, trees: Sequence[ScoredTree]) -> int:
        return self._levels  # the likeliest nodes of all levels are kept

    def grow(self, requests: Sequence[DraftRequest], min_gain: float = 0.0) -> list[ScoredTree]:
        if self._tree_draft:
            return self._grown(requests, self._tree_draft, min_gain)
        limits = [s.draft_limit for s in requests]
        read, place = self.pairs.take_all(requests)
        outputs = self._outputs(read, place)
        levels = min(self.config.levels, max(limits))
        trees = self._candidates(outputs, Expanded(self._last_pairs(requests), self._own_bits), levels, min_gain)
        self._levels = len(trees.ends)
        roots = torch.tensor([[s.tokens[-1]] for s in requests], dtype=torch.int32, device=self._device)
        tokens, parents, depths, scores = self._rooted(trees, roots)
        room = SelectedTrees.empty(len(requests), self.max_nodes, self._device)
        deepest = torch.tensor(limits, dtype=torch.int32, device=self._device)
        tree = select_nodes(tokens, parents, depths, scores, deepest, room)
        columns = (tree.node_counts, tree.tokens, tree.parents, tree.kept, scores)
        return [_scored(*rows) for rows in zip(*(column.tolist() for column in columns), strict=True)]

    def begin_levels(self, trees: Sequence[Growth]) -> EagleLevels:
        requests = [tree.request for tree in trees]
        outputs = self._outputs(*self.pairs.take_all(requests))
        expanded = Expanded(self._last_pairs(requests), self._own_bits)
        return EagleLevels(self.network, self.pairs.pool, trees, outputs, expanded)

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        levels = min(self.config.levels, batch.nodes - 1)
        if not levels:
            return root_trees(batch)
        waiting = batch.drafter_state.rows(batch)
        read, plan = waiting.pairs, self._plan(batch.size, levels)
        outputs = self._read(read, waiting.place)
        trees = GrowingTrees(plan, waiting.roots, waiting.counts, self._tokens, origin=read.last)
        rows = trees.expand(self.network.logits(take_rows(outputs.read, read.last)))
        while rows is not None:
            above = None if rows.in_place else rows.above
            outputs = self.network.forward(
                rows, outputs.fed, waiting.last, self.pairs.pool, first_node=rows.first_node, above=above
            )
            rows = trees.expand(self.network.logits(outputs.read))
        # Without a pair nothing is drafted.
        return batch.selected(*self._cut(*trees.columns), waiting.counts, levels)

    def _plan(self, batch: int, levels: int) -> GrowthPlan:
        """Returns the plan of a batch's trees on the device."""
        key = (batch, levels)
        if key not in self._plans:
            words = self._own_bits.shape[1]
            if self._static and levels > 1:
                orders = [beam[0].int() for beam, _ in self._static.beams[: levels - 1]]
                self._plans[key] = GrowthPlan.ordered(batch, self.config.top_k, orders, words)
            else:
                sizes = (levels, self.config.top_k, self.config.width, words)
                self._plans[key] = GrowthPlan.of(batch, *sizes, self._device)
        return self._plans[key]

    def _outputs(self, read: PairRows, place: CacheBatch) -> Outputs:
        """Reads pairs; returns the network's outputs at each request's last pair."""
        return self._read(read, place).rows(read.last)

    def _read(self, read: PairRows, place: CacheBatch) -> Outputs:
        """Reads pairs; returns the network's outputs of all of them."""
        fused = self.network.fuse(read.hidden_states)
        return self.network.forward(read.rows, fused, place, self.pairs.pool)

    def _last_pairs(self, requests: Sequence[DraftRequest]) -> CacheBatch:
        """Returns the place of each request's last pair, which was taken."""
        return self.pairs.place(requests, [own.first - 1 for own in self.pairs.of(requests)])

    def _grown(self, requests: Sequence[DraftRequest], draft: TreeDraft, min_gain: float) -> list[ScoredTree]:
        """Returns the trees by one call of the core."""
        self._drafted = True
        unread = self.pairs.take_unread(requests)
        limits = [s.draft_limit for s in requests]
        trees, self._levels = draft(
            unread.tokens,
            *self.network.native_rows(unread.hidden_states, unread.rows),
            [s.pages for s in requests],
            unread.cached,
            self.pairs.pool,
            self.network.cos_sin,
            limits,
            min(self.config.levels, max(limits)),
            Thresholds(min_gain, RARE if min_gain else 0.0),
        )
        return trees

    def _candidates(self, outputs: Outputs, expanded: Expanded, levels: int, min_gain: float) -> DynamicTrees:
        """Returns all candidates of at most so many levels, from the outputs of the last true pairs on."""
        trees = DynamicTrees(*self._children(outputs), self.config.width)
        hidden_states, above = outputs.fed[:, None], torch.zeros_like(trees.beam)
        for level in range(levels - 1):
            if self._static:
                beam, places = self._static.beams[level]
                trees.beam = beam.expand(len(trees.beam), -1)
                above = places.expand(len(above), -1)
            elif min_gain:
                depth = len(trees.ends)
                reached = (min(1.0, sum(map(exp, row))) for row in trees.reached.tolist())
                if sum(chance ** (1 + 1 / depth) for chance in reached) < min_gain:
                    break
            above = above[:, : trees.beam.shape[1]]
            first_node = expanded.count  # before the level is added
            rows = expanded.add(trees.opened, above)
            beam = hidden_states.gather(1, above[..., None].expand(-1, -1, hidden_states.shape[2])).flatten(0, 1)
            outputs = self.network.forward(rows, beam, expanded.place, self.pairs.pool, first_node=first_node)
            hidden_states = outputs.fed.view(*trees.beam.shape, -1)
            tokens, scores = self._children(outputs)
            above = trees.grow(tokens.view(*trees.beam.shape, -1), scores.view(*trees.beam.shape, -1))
        return trees

    def _rooted(
        self, trees: DynamicTrees, roots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the columns that select_nodes chooses from."""
        return self._cut(*trees.rooted(roots))

    def _cut(
        self, tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Leaves out the candidates that a given tree has not."""
        if self._static:
            depths = torch.where(self._static.kept[:, : depths.shape[1]], depths, -1)
        return tokens, parents, depths, scores

    def _likeliest(self, outputs: Outputs) -> BackboneTrees:
        """Returns the likeliest children of each row as a tree of one level, in the drafter's tokens."""
        return self._expanders(self.network.logits(outputs.read)[:, None])

    def _children(self, outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the likeliest tokens (the target's ids) and their log-probabilities, [rows, k] each."""
        best = self._likeliest(outputs)
        tokens = best.tokens[:, 1:]
        return tokens.clone() if self._tokens is None else self._tokens.take(tokens.long()), best.scores[:, 1:]


class Eagle1(Eagle):
    """EAGLE-1 and -2: one layer goes on from the target's last hidden states, and the target's own head reads it.

    (Li et al. 2024.)
    """

    name = "eagle"

    def _open(self, path: str | None, target: Transformer) -> LoadedEagle:
        return load_eagle1(open_drafter(self.name, path, target), target, self.config.dtype)


class Eagle3(Eagle):
    """EAGLE-3: one layer reads the target's low, middle and high hidden states (Li et al. 2025)."""

    name = "eagle3"

    def _open(self, path: str | None, target: Transformer) -> LoadedEagle:
        return load_eagle3(open_drafter(self.name, path, target), target, self.config.dtype)


def _scored(
    count: int, tokens: Sequence[int], parents: Sequence[int], kept: Sequence[int], scores: Sequence[float]
) -> ScoredTree:
    """Returns the first nodes of a tree. kept: the candidate that each one was.  scores: of all candidates."""
    own = [scores[candidate] for candidate in kept[:count]]
    above = (own[max(0, parent)] for parent in parents[:count])
    chances = [exp(score - parent) for score, parent in zip(own, above, strict=True)]
    return ScoredTree(tokens[:count], parents[:count], chances)
