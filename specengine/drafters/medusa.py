"""Medusa (Cai et al. 2024, sec. 2.1): small heads on the target's last hidden state, each one token further ahead.

A head knows nothing of the tokens that the heads before it drafted, so the shape of the tree is fixed beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from specengine._C import MAX_NODES
from specengine.draft_policy.cost_model import CostModel, costs_of
from specengine.draft_trees.rank_paths import RankCandidates, RankTree
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.scored_drafter import ScoredDrafter
from specengine.drafters.shipped import open_drafter
from specengine.engine.device.graph_batch import GraphBatch
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.expand_backbone import BackboneExpander
from specengine.ops.row_tools import stack_rows
from specengine.ops.weight import Projection
from specengine.utils.spec_string import check_range

PREFIXES = ("", "medusa_head.", "medusa_heads.")  # of heads alone, and of files that hold the target too


@dataclass(frozen=True)
class Config:
    """tree: a published one by name, or a JSON file of rank paths, best first. Levels without a head are left out.
    nodes: the first so many are drafted, root included.
    adaptive: draft as many of them as pay, likeliest first (any choice is lossless under the rule `match`).
    dtype: of the heads, as the engine's.
    """

    tree: str = "mc_sim_7b_63"
    nodes: int = 64
    adaptive: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 2, MAX_NODES)


@dataclass
class State:
    """Of one request. row: float32 [1, hidden], the target's last hidden state before the root.  drafted: from that row."""

    row: torch.Tensor
    drafted: ScoredTree | None = None


@dataclass
class DeviceState:
    """Of all slots. rows: float32 [slots, hidden], as of State.  known: int32 [slots], 0 where there is none yet: a
    prompt of one token has no row before its root."""

    rows: torch.Tensor
    known: torch.Tensor


@dataclass(frozen=True)
class Head:
    """x becomes x + silu(block(x)) block by block, then logits; head 0 drafts the token behind the root."""

    blocks: tuple[Projection, ...]
    logits: Projection


class Medusa(ScoredDrafter):
    """Drafts from the target's state of the position before the root, with one head per level."""

    name = "medusa"
    config_type = Config
    config: Config
    takes_path = True
    reads_hidden_states = True
    drafts_on_device = True

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CostModel | None = None) -> None:
        super().__init__(config, path, target)
        checkpoint = open_drafter(self.name, path, target)
        tokens = checkpoint.vocabulary(target.config)
        self._vocabulary = None if tokens is None else tokens.int().to(target.device)
        self._linear, self._device, self._hidden = target.ops.linear, target.device, target.config.hidden_size
        self.heads = read_heads(checkpoint, config.dtype, target)
        tree = RankTree.named(config.tree).first(config.nodes - 1, len(self.heads))
        self.candidates = RankCandidates(tree, target.device)
        check_range("drafter: tree: ranks", self.candidates.ranks, 1, self.heads[0].logits.rows)
        measured = config.adaptive and not target.ops.resident
        self._costs = costs or costs_of(target) if measured else None
        self._expanders: dict[int, tuple[BackboneExpander, torch.Tensor]] = {}  # by batch size

    @property
    def projections(self) -> list[Projection]:
        return [product for head in self.heads for product in (*head.blocks, head.logits)]

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def max_nodes(self) -> int:
        return len(self.candidates.parents)

    def observe_prompt(self, request, start: int, hidden_states: HiddenStates) -> None:
        request.drafter_state = State(hidden_states.last[-1:].clone())

    def observe(self, requests: Sequence, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        assert hidden_states is not None  # it reads them
        end = 0
        for request, tokens in zip(requests, committed, strict=True):
            end += len(tokens)
            self._learn(request, tokens)
            request.drafter_state = State(hidden_states.last[end - 1 : end].clone())

    def grow(self, requests: Sequence) -> list[ScoredTree]:
        trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        known = [slot for slot, request in enumerate(requests) if request.drafter_state]
        if known:
            columns = self._draft(stack_rows([requests[slot].drafter_state.row for slot in known]))
            for slot, tokens, chances in zip(known, *columns, strict=True):
                tree, request = ScoredTree(tokens, self.candidates.parents.tolist(), chances), requests[slot]
                trees[slot] = tree.rooted(request.tokens[-1], request.draft_limit)
        return trees

    def _draft(self, rows: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens of all candidates, and the chance of each once its parent is accepted."""
        tokens, scores = self._scored(rows)
        before = scores[:, self.candidates.parents.clamp(min=0)]
        return tokens.tolist(), (scores - before).exp_().tolist()

    def new_device_state(self, slots: int) -> DeviceState:
        rows = torch.zeros(slots, self._hidden, device=self._device)
        return DeviceState(rows, torch.zeros(slots, dtype=torch.int32, device=self._device))

    def load(self, state: DeviceState, requests: Sequence) -> None:
        state.known.zero_()
        for slot, request in enumerate(requests):
            if request.drafter_state:
                state.rows[slot], state.known[slot] = request.drafter_state.row[0], 1

    def unload(self, state: DeviceState, requests: Sequence) -> None:
        for slot, (request, known) in enumerate(zip(requests, state.known.tolist(), strict=False)):
            request.drafter_state = State(state.rows[slot : slot + 1].clone()) if known else None

    def observe_on_device(self, slots: GraphBatch, hidden_states: HiddenStates) -> None:
        state, size, accepted = slots.drafter_state, slots.size, slots.accepted
        last = accepted.path.gather(1, (accepted.path_length[:, None] - 1).clamp(min=0).long())[:, 0]
        state.rows[:size] = hidden_states.last[(slots.row_start[:size] + last.clamp(min=0)).long()]
        state.known[:size] = accepted.path_length > 0

    def draft_on_device(self, slots: GraphBatch) -> TreeBatch:
        state, size, history = slots.drafter_state, slots.size, slots.history
        tokens, scores = self._scored(state.rows[:size])
        tokens[:, :1] = history.tokens.gather(1, history.length[:, None].long() - 1)
        parents, depths = (
            each.expand(size, -1).contiguous() for each in (self.candidates.parents, self.candidates.depths)
        )
        return slots.selected(tokens, parents, depths, scores, state.known[:size] * self.candidates.levels)

    def _scored(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The candidates of rows [B, hidden], as of RankCandidates.fill, tokens of the target."""
        levels, ranks, batch = self.candidates.levels, self.candidates.ranks, len(rows)
        logits = self.logits(rows, levels)
        if batch not in self._expanders:  # every distribution is the only level of a tree of its own
            shape = (levels * batch, 1, logits.shape[-1])
            roots = torch.zeros(levels * batch, dtype=torch.int32, device=rows.device)
            self._expanders[batch] = (BackboneExpander(*shape, [ranks], (), rows.device), roots)
        expander, roots = self._expanders[batch]
        best = expander(logits.view(levels * batch, 1, -1), roots)
        tokens, log_probs = (each[:, 1:].reshape(levels, batch, ranks) for each in (best.tokens, best.scores))
        if self._vocabulary is not None:
            tokens = torch.where(tokens < 0, tokens, self._vocabulary[tokens.long()])
        return self.candidates.fill(tokens, log_probs)

    def logits(self, rows: torch.Tensor, levels: int) -> torch.Tensor:
        """float32 [levels, B, Vd] of the target's last features [B, hidden] of the rows before the roots."""
        parts = []
        for head in self.heads[:levels]:
            x = rows
            for block in head.blocks:
                x = x + functional.silu(self._linear(x, block))
            parts.append(self._linear(x, head.logits))
        return stack_rows(parts).view(levels, len(rows), -1)


def read_heads(checkpoint: DraftCheckpoint, dtype: str, target: Transformer) -> list[Head]:
    """Raises ValueError where the heads do not fit the target.

    Names: `{head}.{block}.linear.weight` and `.bias`, then `{head}.{blocks}.weight`. Where the last ones are missing,
    as in the oldest files, the target's own head is meant.
    """
    hidden, loader = target.config.hidden_size, WeightLoader(checkpoint, dtype, target.device, target.ops)
    names, tokens = checkpoint.tensors, checkpoint.vocabulary(target.config)
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}0.0.linear.weight" in names), None)
    if prefix is None:
        raise checkpoint.error("holds no Medusa heads: tensor '0.0.linear.weight' is missing")
    linear = re.compile(re.escape(prefix) + r"(\d+)\.(\d+)\.linear\.weight")
    places = [tuple(map(int, found.groups())) for found in map(linear.fullmatch, names) if found]
    shared = target.head_rows(None if tokens is None else tokens.int().to(target.device))
    heads = []
    for i in range(1 + max(places)[0]):
        count = 1 + max((block for head, block in places if head == i), default=0)
        blocks, own = [f"{prefix}{i}.{block}.linear" for block in range(count)], f"{prefix}{i}.{count}"
        for block in blocks:
            checkpoint.expect(f"{block}.weight", hidden, hidden)
        if f"{own}.weight" in names:
            size = checkpoint.rows(f"{own}.weight")
            if (size > shared.rows) if tokens is None else (size != shared.rows):
                expected = f"the target has {shared.rows}" if tokens is None else f"its d2t names {shared.rows}"
                raise checkpoint.error(f"head {i} tells {size} tokens apart, {expected}")
            checkpoint.expect(f"{own}.weight", size, hidden)
        last = loader.linear(own) if f"{own}.weight" in names else shared
        heads.append(Head(tuple(map(loader.linear, blocks)), last))
    if len(sizes := {head.logits.rows for head in heads}) > 1:
        raise checkpoint.error(f"its heads have different vocabularies: {sorted(sizes)} tokens")
    return heads
