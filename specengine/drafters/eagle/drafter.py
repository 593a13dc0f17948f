"""What EAGLE-1, -2 and -3 share as drafters: true hidden states first, then level by level on what the network says.

A draft first reads the pairs of hidden state and token that the last cycle made known. Their keys and values stay. Those of
drafted nodes lie behind them until the next draft writes over them.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import TYPE_CHECKING, Any

import torch

from specengine._C import MAX_NODES
from specengine.cache.kv_cache import CacheBatch
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.tree_choice import deeper_pays
from specengine.draft_trees.backbone import backbone_tree
from specengine.draft_trees.dynamic import DynamicTrees
from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.static import StaticTree
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.eagle.checkpoint import EagleDrafter
from specengine.drafters.eagle.expanded_rows import Expanded, own_bits
from specengine.drafters.eagle.network import EagleLayers, Outputs
from specengine.drafters.hidden_states.drafter import HiddenStateDrafter
from specengine.drafters.hidden_states.pairs import PairRows, take_pairs
from specengine.models.transformer import Transformer
from specengine.ops.draft_backbone import BackboneDraft
from specengine.ops.expand_backbone import BackboneExpander
from specengine.ops.select_nodes import SelectedTrees, select_nodes
from specengine.utils.spec_string import check_range

if TYPE_CHECKING:
    from specengine.engine.device.graph_batch import GraphBatch

MAX_CANDIDATES = 2048  # of select_nodes
UNLIKELY = 0.02  # a node that is reached less often is not worth the rows of its children
RARE = 0.01  # a node that is reached less often is not worth its row


@dataclass(frozen=True)
class EagleConfig:
    """nodes: of the largest tree, root included.  levels: of the tree (the public code's depth and one).
    top_k: children per node.  beam: nodes expanded per level; 0: top_k of them, as EAGLE-2 has it; 1: the likeliest
    one, its siblings are leaves, and a draft costs what that of a chain does.  adaptive: keep the nodes that pay, else
    always the largest tree.  tree: one given as rank paths instead, a published one (eagle_25 is EAGLE-1's) or a .json
    file with a list of them.  dtype: of the drafter's weights, as the engine's.
    """

    nodes: int = 60
    levels: int = 8
    top_k: int = 10
    beam: int = 0
    tree: str = ""
    adaptive: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 2, MAX_NODES)
        check_range("levels", self.levels, 1, MAX_NODES - 1)
        check_range("top_k", self.top_k, 1, MAX_NODES - 1)
        check_range("beam", self.beam, 0, self.top_k)
        if 1 + self.candidates > MAX_CANDIDATES:
            raise ValueError(
                f"levels: {self.levels} of them with top_k={self.top_k} are {self.candidates} candidates, at most "
                f"{MAX_CANDIDATES - 1} are possible"
            )
        if self.expanded > MAX_NODES:
            raise ValueError(
                f"levels: {self.levels} of them with top_k={self.top_k} are {self.expanded} rows to attend to, "
                f"at most {MAX_NODES} are possible"
            )

    @property
    def candidates(self) -> int:
        """Nodes the tree is chosen from."""
        return self.top_k + (self.levels - 1) * self.width * self.top_k

    @property
    def expanded(self) -> int:
        """Nodes whose children are looked at, root included."""
        return 1 + (self.levels - 1) * self.width

    @property
    def width(self) -> int:
        """Nodes expanded per level."""
        return self.beam or self.top_k


class Eagle(HiddenStateDrafter):
    """A drafter whose network goes on from its own output where the target's hidden states end."""

    config: EagleConfig
    network: EagleLayers

    def __init__(self, config: EagleConfig, path: str | None, target: Transformer) -> None:
        self._static = StaticTree(RankTree.named(config.tree), target.device) if config.tree else None
        if self._static:
            shape = self._static
            config = replace(config, nodes=shape.nodes, levels=shape.levels, top_k=shape.top_k, beam=0)
        loaded = self._open(config.dtype, path, target)
        check_range("top_k", config.top_k, 1, loaded.layers.head.rows)
        super().__init__(config, target, loaded.layers, loaded.hidden_state_layers, config.levels)
        self._tokens = loaded.tokens
        self._level_seconds: dict[int, float] = {}  # of one more level, by its rows
        self._expanders: dict[int, tuple[BackboneExpander, torch.Tensor]] = {}  # and roots, by rows
        self._own_bits = own_bits(config.expanded).to(target.device)
        whole = config.width == 1 and not self._static
        self._backbone_draft = loaded.layers.backbone_draft(loaded.tokens, config.top_k) if whole else None

    @abstractmethod
    def _open(self, dtype: str, path: str | None, target: Transformer) -> EagleDrafter:
        """The network of a checkpoint; without a path the one that comes with the package."""

    @property
    def drafts_chains(self) -> bool:
        return self.config.top_k == 1

    @property
    def max_nodes(self) -> int:
        return min(self.config.nodes, 1 + self.config.candidates)

    @property
    def spare_slots(self) -> int:
        return max(self.max_nodes, self.config.expanded)

    def draft_on_device(self, slots: GraphBatch) -> TreeBatch:
        pairs, history = slots.drafter_state, slots.history
        first, counts = pairs.first[: slots.size], pairs.counts[: slots.size]
        table, read = slots.cache.block_table, pairs.rows(slots)
        outputs = self._pass(read, CacheBatch(table, first)).rows(read.last)
        expanded = Expanded(CacheBatch(table, first + counts - 1), self._own_bits, counts > 0)
        trees = self._grow(outputs, expanded, self.config.levels, None)
        roots = history.tokens.gather(1, history.length[:, None].long() - 1)
        limits = torch.where(counts > 0, self.config.levels, 0)  # nothing read, nothing drafted
        return slots.selected(*self._candidates(trees, roots), limits)

    def _trees(self, requests: Sequence) -> list[ScoredTree]:
        if self._backbone_draft:
            return self._backbones(requests, self._backbone_draft)
        pairs, limits = self._pairs(requests), [s.draft_limit for s in requests]
        outputs = self._read(requests, [own.count for own in pairs])
        place = self._place(requests, [own.first - 1 for own in pairs])
        expanded = Expanded(place, self._own_bits, None)
        trees = self._grow(outputs, expanded, min(self.config.levels, max(limits)), self._costs)
        roots = torch.tensor([[s.tokens[-1]] for s in requests], dtype=torch.int32, device=self._device)
        candidates = self._candidates(trees, roots)
        tree = SelectedTrees.empty(len(requests), self.max_nodes, self._device)
        tree = select_nodes(*candidates, torch.tensor(limits, dtype=torch.int32, device=self._device), tree)
        columns = (tree.node_counts, tree.tokens, tree.parents, tree.kept, candidates[3])
        return [_scored(*rows) for rows in zip(*(column.tolist() for column in columns), strict=True)]

    def _backbones(self, requests: Sequence, draft: BackboneDraft) -> list[ScoredTree]:
        begin, batch, pairs = time.perf_counter(), len(requests), self._pairs(requests)
        place = self._place(requests, [own.first for own in pairs])
        runs, picked = take_pairs(requests, pairs, [own.count for own in pairs])
        self.network.ensure_positions(max(own.first for own in pairs) + self.config.levels)
        levels = min(self.config.levels, max(s.draft_limit for s in requests))
        # what another level takes, in passes
        least = 0.0 if self._costs is None else self._level_seconds.get(batch, 0.0) / self._costs(batch)
        hidden_states, cos_sin = self.network.backbone_features(picked), self.network.cos_sin
        tokens, scores = draft(runs, hidden_states, place, self._pool, cos_sin, levels, least)
        self._took(batch, (time.perf_counter() - begin) / len(tokens[0]))
        rare = 0.0 if self._costs is None else RARE
        return [
            backbone_tree(s.tokens[-1], own, chances, s.draft_limit, self.max_nodes - 1, rare)
            for s, own, chances in zip(requests, tokens, scores, strict=True)
        ]

    def _grow(self, outputs: Outputs, expanded: Expanded, levels: int, costs: CostModel | None) -> DynamicTrees:
        """All candidates, from the outputs of the last true pairs on; costs: no deeper than pays."""
        trees = DynamicTrees(*self._children(outputs), self.config.width)
        hidden_states, above = outputs.fed[:, None], torch.zeros_like(trees.beam)
        for level in range(levels - 1):
            begin = time.perf_counter()
            if self._static:
                beam, places = self._static.beams[level]
                trees.beam, above = beam.expand(len(trees.beam), -1), places.expand(len(above), -1)
            elif costs is not None and not self._pays(trees, costs):
                break
            above = above[:, : trees.beam.shape[1]]
            first_node, rows = expanded.count, expanded.add(trees.opened, above)
            beam = hidden_states.gather(1, above[..., None].expand(-1, -1, hidden_states.shape[2])).flatten(0, 1)
            outputs = self.network.forward(rows, beam, expanded.place, self._pool, first_node=first_node)
            hidden_states = outputs.fed.view(*trees.beam.shape, -1)
            above = trees.grow(*(part.view(*trees.beam.shape, -1) for part in self._children(outputs)))
            self._took(len(beam), time.perf_counter() - begin)
        return trees

    def _candidates(
        self, trees: DynamicTrees, roots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What select_nodes chooses from."""
        tokens, parents, depths, scores = trees.rooted(roots)
        if self._static:
            depths = torch.where(self._static.kept[:, : depths.shape[1]], depths, -1)
        return tokens, parents, depths, scores

    def _pays(self, trees: DynamicTrees, costs: CostModel) -> bool:
        """Whether one more level may save more time than it takes; leaves only nodes in the beam that may matter."""
        chances = [[exp(score) for score in row] for row in trees.reached.tolist()]
        batch, depth = len(chances), len(trees.ends)
        # A node's token shortens a cycle's share in a token by less the more the cycle brings: above a node lie `depth`
        # tokens, root included, each of which is reached as often at least.
        row = costs(2 * batch) / costs(batch) - 1  # what a node more in every request takes
        least = max(UNLIKELY, row)
        width = max(1, *(sum(chance >= least * (1 + depth * chance) for chance in own) for own in chances))
        trees.beam = trees.beam[:, :width]
        reached = [min(1.0, sum(own[:width])) for own in chances]  # one of them at most
        expected = [1 + depth * chance for chance in reached]
        return deeper_pays(reached, expected, depth, costs(batch), self._level_seconds.get(batch * width, 0.0))

    def _took(self, rows: int, seconds: float) -> None:
        """The least of late: a level that was slow by chance must not keep others from being tried."""
        self._level_seconds[rows] = min(seconds, 1.02 * self._level_seconds.get(rows, seconds))

    def _read(self, requests: Sequence, counts: Sequence[int], drafting: bool = True) -> Any:
        """Reads the first pairs of every request; drafting: returns the outputs of the last ones."""
        pairs = self._pairs(requests)
        place = self._place(requests, [own.first for own in pairs])
        read = PairRows.take(requests, pairs, counts, self._device)
        self.network.ensure_positions(max(own.first for own in pairs) + self.config.levels)
        if drafting:
            return self._pass(read, place).rows(read.last)
        self.network.cache_only(read.rows, self.network.fuse(read.hidden_states), place, self._pool)

    def _pass(self, read: PairRows, place: CacheBatch) -> Outputs:
        return self.network.forward(read.rows, self.network.fuse(read.hidden_states), place, self._pool)

    def _children(self, outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens (the target's ids) and their log-probabilities: [rows, k] each."""
        rows, logits = len(outputs.read), self.network.logits(outputs.read)
        if rows not in self._expanders:
            expander = BackboneExpander(rows, 1, logits.shape[1], [self.config.top_k], (), self._device)
            self._expanders[rows] = expander, torch.zeros(rows, dtype=torch.int32, device=self._device)
        expander, roots = self._expanders[rows]
        best = expander(logits[:, None], roots)
        tokens = best.tokens[:, 1:]
        return tokens.clone() if self._tokens is None else self._tokens.take(tokens.long()), best.scores[:, 1:]


def _scored(
    count: int, tokens: Sequence[int], parents: Sequence[int], kept: Sequence[int], scores: Sequence[float]
) -> ScoredTree:
    """The first nodes of a tree; kept: the candidate that each one was.  scores: of all candidates."""
    own = [scores[candidate] for candidate in kept[:count]]
    above = (own[max(0, parent)] for parent in parents[:count])
    chances = [exp(score - parent) for score, parent in zip(own, above, strict=True)]
    return ScoredTree(tokens[:count], parents[:count], chances)
