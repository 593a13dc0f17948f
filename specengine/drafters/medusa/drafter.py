"""Medusa (Cai et al. 2024, sec. 2.1): small heads on the target's last hidden state, each one token further ahead.

A head does not know the tokens that earlier heads drafted, so the shape of the tree is fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.nn import functional

from specengine._C import MAX_NODES
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
    DeviceStateDrafter,
    HiddenStateReader,
    NetworkDrafter,
    ScoredDrafter,
)
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.growth import Growth
from specengine.drafters.distributions.level_logits import LevelDistributions, LevelLogits
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.level_drafts import Children
from specengine.drafters.medusa.heads import Head, read_heads
from specengine.drafters.medusa.native_draft import HeadsDraft
from specengine.drafters.policies import policy_of
from specengine.drafters.root_tokens import root_trees
from specengine.drafters.shipped import open_drafter
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.expand_backbone import BackboneTrees
from specengine.ops.growth.add_delta import add_delta, rounded
from specengine.ops.growth.fill_ranks import fill_ranks
from specengine.ops.growth.pairs import keep_last
from specengine.ops.row_tools import stack_rows, take_rows
from specengine.ops.weight import Projection
from specengine.rules.base import Wants
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Config:
    """The options.

    tree: a published one by name, or a JSON file of rank paths, best first. Levels without a head are left out.
    nodes: of the largest tree, root included.
    adaptive: draft the likeliest nodes that pay, otherwise all. Any choice is lossless under the rule `match`.
    dtype: of the heads, as the engine's.
    sample: draw the children from the heads' distributions, for rules that read them.
    """

    tree: str = "mc_sim_7b_63"
    nodes: int = 64
    adaptive: bool = True
    dtype: str = "auto"
    sample: bool = False

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 2, MAX_NODES)


@dataclass
class State:
    """What the drafter remembers of one request.

    row: float32 [1, hidden], the target's last hidden state before the root.
    """

    row: torch.Tensor


@dataclass
class DeviceState:
    """What the drafter remembers of all slots.

    rows: float32 [slots, hidden], as of State.  known: int32 [slots], 1 where there is a row: a prompt of one token has
    none before its root.
    """

    rows: torch.Tensor
    known: torch.Tensor


class Medusa(Drafter, HiddenStateReader, ScoredDrafter, LevelDistributions, NetworkDrafter, DeviceStateDrafter):
    """Drafts from the target's state of the position before the root, with one head per level."""

    name = "medusa"
    config_type = Config
    config: Config
    takes_path = True
    offers = frozenset(Wants)

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        checkpoint = open_drafter(self.name, path, target)
        tokens = checkpoint.vocabulary(target.config)
        self._vocabulary = None if tokens is None else tokens.int().to(target.device)
        self._linear = target.ops.linear
        self._on_device, self._dtype_for = target.ops.on_device, target.ops.layer.dtype_for
        self._device = target.device
        self._hidden = target.config.hidden_size
        self.heads = read_heads(checkpoint, config.dtype, target)
        tree = RankTree.named(config.tree).first(config.nodes - 1, len(self.heads))
        self.candidates = RankCandidates(tree, target.device)
        rows = self.heads[0].logits.rows
        check_range("drafter: tree: ranks", self.candidates.ranks, 1, rows)
        self.logits_device, self.samples = target.device, config.sample
        self.columns = Columns.of(self._vocabulary, rows, target.config.vocab_size, target.device)
        self.shape = TreeShape.of_ranks(tree)
        self.calibrated = CalibratedTrees(self.name)
        self.policy = policy_of(self, target, costs, [self])
        self._expanders = BackboneExpanders([self.candidates.ranks])
        self._native: HeadsDraft | None = None
        if not target.ops.on_device:
            heads, ranks = self.heads[: self.candidates.levels], self.candidates.ranks
            self._native = HeadsDraft(self._hidden, heads, self._vocabulary, ranks)

    @property
    def projections(self) -> list[Projection]:
        return [product for head in self.heads for product in (*head.blocks, head.logits)]

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def max_nodes(self) -> int:
        return self.candidates.nodes

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft(requests)

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        request.drafter_states[self] = State(hidden_states.last[-1:].clone())

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        assert hidden_states is not None  # a HiddenStateReader is given them
        ends = accumulate(map(len, committed))
        rows = hidden_states.rows([end - 1 for end in ends]).last
        parts = [rows] if len(committed) == 1 else rows.split(1)
        for request, tokens, row in zip(draft.requests, committed, parts, strict=True):
            self.calibrated.learn(request, tokens)
            request.drafter_states[self] = State(row)
        self.policy.observe(draft, committed)

    def propose(self, requests: Sequence[DraftRequest], min_gain: float) -> list[ScoredTree]:
        trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        known = [i for i, request in enumerate(requests) if self in request.drafter_states and request.draft_limit > 0]
        if known:
            rows = stack_rows([requests[i].drafter_states[self].row for i in known])
            levels = min(self.candidates.levels, max(requests[i].draft_limit for i in known))
            for i, tokens, scores in zip(known, *self._children(rows, levels), strict=True):
                trees[i] = self.candidates.tree(requests[i].tokens[-1], tokens, scores, requests[i].draft_limit)
        return self.calibrated.calibrate(requests, trees)

    @property
    def drafts_chains(self) -> bool:
        return all(len(children) <= 1 for children in self.shape.children)

    def levels_for(self, request: DraftRequest) -> int:
        return request.draft_limit if self in request.drafter_states else 0

    def begin_levels(self, trees: Sequence[Growth]) -> LevelLogits:
        rows = stack_rows([tree.request.drafter_states[self].row for tree in trees])
        logits = self.logits(rows, min(self.candidates.levels, max(tree.depth for tree in trees)))
        slots = [tree.slot for tree in trees]

        def level_logits(growing: Sequence[Growth], level: int) -> torch.Tensor:
            return take_rows(logits[level], [slots.index(tree.slot) for tree in growing for _ in tree.open])

        return level_logits

    def skip(self, requests: Sequence[DraftRequest]) -> None:
        self.calibrated.forget(requests)

    @property
    def learned(self) -> list[list[float]]:
        return self.calibrated.learned

    def new_device_state(self, slots: int) -> DeviceState:
        rows = torch.zeros(slots, self._hidden, device=self._device)
        return DeviceState(rows, torch.zeros(slots, dtype=torch.int32, device=self._device))

    @property
    def device_rows(self) -> int:
        return len(self.heads)

    def load(self, state: DeviceState, slot: int, request: DraftRequest) -> None:
        if self in request.drafter_states:
            state.rows[slot] = request.drafter_states[self].row[0]
            state.known[slot] = 1

    def unload(self, state: DeviceState, slot: int, request: DraftRequest | None) -> None:
        if request and state.known[slot]:
            request.drafter_states[self] = State(state.rows[slot : slot + 1].clone())
        state.known[slot] = 0

    def observe_on_device(self, batch: DraftBatch, hidden_states: HiddenStates) -> None:
        state = batch.drafter_state
        keep_last(hidden_states.normed, batch.row_start, batch.accepted, state.rows, state.known)

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        state, size = batch.drafter_state, batch.size
        levels = min(self.candidates.levels, batch.nodes - 1)
        if not levels:
            return root_trees(batch)
        best = self._expanded(state.rows[:size], levels)
        nodes = self.candidates.columns(levels)
        candidates = fill_ranks(best, self._vocabulary, nodes, batch.history, by_request=False)
        return batch.selected(*candidates, state.known[:size], levels)

    def logits(self, rows: torch.Tensor, levels: int) -> torch.Tensor:
        """Returns float32 [levels, B, Vd] of the target's last hidden states [B, hidden] before the roots."""
        heads = self.heads[:levels]
        entering = {dtype: rounded(rows, dtype) for dtype in {self._dtype_for(head.blocks[0]) for head in heads}}
        parts = (self._behind_blocks(rows, entering[self._dtype_for(head.blocks[0])], head) for head in heads)
        if not self._on_device:
            return stack_rows([self._linear(read, head.logits) for read, head in zip(parts, heads, strict=True)]).view(
                levels, len(rows), -1
            )
        out = torch.empty(levels, len(rows), heads[0].logits.rows, device=rows.device)
        for read, head, own in zip(parts, heads, out, strict=True):
            self._linear(read, head.logits, out=own)
        return out

    def _behind_blocks(self, x: torch.Tensor, read: torch.Tensor, head: Head) -> torch.Tensor:
        """Returns what a head's last product reads. read: x as the first one does."""
        for block, reader in pairwise((*head.blocks, head.logits)):
            delta = self._linear(read, block)
            if self._on_device:
                total = torch.empty_like(x)
                read, x = add_delta(x, delta, self._dtype_for(reader), total=total, silu=True), total
            else:
                x = read = x + functional.silu(delta)
        return read

    def _children(self, rows: torch.Tensor, levels: int) -> Children:
        """Returns the likeliest tokens of each request's levels, the target's ids, and their log-probabilities."""
        if self._native:
            return self._native(rows, levels)
        tokens, log_probs = self._best(rows, levels)
        return tokens.transpose(0, 1).tolist(), log_probs.transpose(0, 1).tolist()

    def _best(self, rows: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the likeliest tokens of the target and their log-probabilities, [levels, B, ranks] each."""
        ranks, batch = self.candidates.ranks, len(rows)
        best = self._expanded(rows, levels)
        tokens = best.tokens[:, 1:].reshape(levels, batch, ranks)
        log_probs = best.scores[:, 1:].reshape(levels, batch, ranks)
        if self._vocabulary is not None:
            tokens = torch.where(tokens < 0, tokens, self._vocabulary[tokens.long()])
        return tokens, log_probs

    def _expanded(self, rows: torch.Tensor, levels: int) -> BackboneTrees:
        """Returns the drafter's likeliest tokens, a tree of one level for each distribution: row level * B + b."""
        logits = self.logits(rows, levels)
        return self._expanders(logits.view(levels * len(rows), 1, -1))
