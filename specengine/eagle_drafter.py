"""What EAGLE-1, -2 and -3 share as drafters: true features first, then level by level on what the network says.

A draft first reads the pairs of feature and token that the last cycle made known. Their keys and values stay. Those of
drafted nodes lie behind them until the next draft writes over them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specengine._C import MAX_NODES
from specengine.cost_model import costs_of
from specengine.drafters.base import Drafter
from specengine.dynamic_tree import DynamicTrees, number_nodes
from specengine.feature_pairs import PairRows, Pairs
from specengine.features import Features
from specengine.kv_cache import CacheBatch, KVCache
from specengine.models.eagle_checkpoint import EagleDrafter
from specengine.models.eagle_layers import Rows
from specengine.models.transformer import Transformer
from specengine.ops.expand_backbone import BackboneExpander
from specengine.options import check_range
from specengine.scored_trees import Drafted, ScoredTree, TreeCutter
from specengine.tree import DraftTree


@dataclass(frozen=True)
class EagleConfig:
    """nodes: of the largest tree, root included.  levels: of the tree (the public code's depth and one).
    top_k: children per node, and nodes expanded per level.  adaptive: keep the nodes that pay, else always the largest
    tree.  dtype: of the drafter's weights, as the engine's.
    """

    nodes: int = 60
    levels: int = 8
    top_k: int = 10
    adaptive: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 2, MAX_NODES)
        check_range("levels", self.levels, 1, MAX_NODES - 1)
        check_range("top_k", self.top_k, 1, MAX_NODES - 1)
        if self.expanded > MAX_NODES:
            raise ValueError(
                f"levels: {self.levels} of them with top_k={self.top_k} are {self.expanded} rows to attend to, "
                f"at most {MAX_NODES} are possible"
            )

    @property
    def expanded(self) -> int:
        """Nodes whose children are looked at, root included."""
        return 1 + (self.levels - 1) * self.top_k


@dataclass
class State:
    """What the drafter remembers of one sequence."""

    pairs: Pairs = field(default_factory=Pairs)
    drafted: Drafted | None = None


class Eagle(Drafter):
    """A drafter whose network goes on from its own output where the target's features end."""

    takes_path = True
    reads_features = True

    def __init__(self, config: EagleConfig, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        loaded = self._open(path, target)
        self.network, self.taps, self._tokens = loaded.layers, loaded.taps, loaded.tokens
        self._cache_dtype, self._device = target.cache_dtype, target.device
        check_range("top_k", config.top_k, 1, self.network.head.rows)
        self._cutter = TreeCutter(costs_of(target) if config.adaptive else None)
        self._expanders: dict[int, BackboneExpander] = {}  # by rows
        self._own_bits = _own_bits(config.expanded).to(target.device)

    @abstractmethod
    def _open(self, path: str | None, target: Transformer) -> EagleDrafter:
        """The network of a checkpoint; without a path the one that comes with the package."""

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return self.config.top_k == 1

    @property
    def max_nodes(self) -> int:
        top_k, levels = self.config.top_k, self.config.levels
        return min(self.config.nodes, 1 + top_k + (levels - 1) * top_k**2)

    @property
    def spare_slots(self) -> int:
        return max(self.max_nodes, self.config.expanded)

    @property
    def page_bytes(self) -> int:
        return self._pool.page_bytes

    def attach(self, cache: KVCache) -> None:
        c = self.network.config
        self._cache = cache
        self._pool = cache.companion(c.num_layers, c.num_kv_heads, c.head_dim, self._cache_dtype)

    def observe_prompt(self, sequence, start: int, features: Features) -> None:
        pairs, picked = self._state(sequence).pairs, self.network.pick(features)
        pairs.add(picked, sequence.tokens[start + 1 : start + 1 + len(picked)])
        if len(pairs.tokens) > 1:
            self._read([sequence], [len(pairs.tokens) - 1], drafting=False)  # the last one is drafted from

    def observe(self, sequences: Sequence, committed: Sequence[list[int]], features: Features) -> None:
        picked, first = self.network.pick(features), 0
        for sequence, tokens in zip(sequences, committed, strict=True):
            state = self._state(sequence)
            state.pairs.add(picked[first : first + len(tokens)], tokens)
            first += len(tokens)
            if state.drafted:
                self._cutter.observe(state.drafted, tokens)

    def draft(self, sequences: Sequence) -> list[DraftTree]:
        scored = [ScoredTree([sequence.tokens[-1]], [-1], [1.0]) for sequence in sequences]
        # a prompt of one token has no pair yet
        ready = [i for i, s in enumerate(sequences) if self._state(s).pairs.tokens and s.draft_limit > 0]
        if ready:
            drafting = [sequences[i] for i in ready]
            for i, tree in zip(ready, self._trees(self._grow(drafting), drafting), strict=True):
                scored[i] = tree
        prefix = sum(len(sequence.tokens) for sequence in sequences) / max(1, len(sequences))
        for sequence, drafted in zip(sequences, self._cutter.cut(scored, prefix), strict=True):
            sequence.drafter_state.drafted = drafted
        return [sequence.drafter_state.drafted.tree for sequence in sequences]

    @torch.inference_mode()
    def _grow(self, sequences: Sequence) -> DynamicTrees:
        """All candidates, as deep as one of the sequences can use."""
        states = [self._state(sequence) for sequence in sequences]
        hidden, kept = self._read(sequences, [len(state.pairs.tokens) for state in states])
        levels = min(self.config.levels, max(sequence.draft_limit for sequence in sequences))
        trees = DynamicTrees(*(part.clone() for part in self._children(hidden)))
        place = self._place(sequences, [state.pairs.first - 1 for state in states])
        expanded = _Expanded(len(sequences), place, self._own_bits)
        features, above = self.network.feed_back(hidden)[:, None], torch.zeros_like(trees.beam)
        for _ in range(levels - 1):
            rows = expanded.add(above)
            beam = features.gather(1, above[..., None].expand(-1, -1, features.shape[2])).flatten(0, 1)
            tokens = trees.tokens.gather(1, trees.beam).flatten()
            hidden, kept = self.network.forward(tokens, beam, rows, self._pool, kept=kept)
            features = self.network.feed_back(hidden).view(*trees.beam.shape, -1)
            above = trees.grow(*(part.view(*trees.beam.shape, -1) for part in self._children(hidden)))
        return trees

    def _trees(self, trees: DynamicTrees, sequences: Sequence) -> list[ScoredTree]:
        """The best candidates of every sequence as a tree, no deeper than it needs."""
        allowed = [trees.ends[min(len(trees.ends), sequence.draft_limit) - 1] for sequence in sequences]
        allowed = torch.tensor(allowed, device=self._device)
        nodes, above = number_nodes(trees.scores, trees.parents, allowed, self.config.nodes - 1)
        before = trees.scores.gather(1, trees.parents.clamp(min=0)).masked_fill(trees.parents < 0, 0)
        chances, chosen = (trees.scores - before).exp(), nodes > 0
        return [
            ScoredTree(*([head, *column[b][chosen[b]].tolist()] for head, column in heads))
            for b, sequence in enumerate(sequences)
            for heads in [((sequence.tokens[-1], trees.tokens), (-1, above), (1.0, chances))]
        ]

    @torch.inference_mode()
    def _read(
        self, sequences: Sequence, counts: Sequence[int], drafting: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Reads the first pairs of every sequence; drafting: [B, hidden] and [q | k | v] per layer of the last ones."""
        pairs = [self._state(sequence).pairs for sequence in sequences]
        starts = [own.first for own in pairs]
        read = PairRows.take(pairs, counts, self._device)
        self.network.ensure_positions(max(own.first for own in pairs) + self.config.levels)
        place, rows = self._place(sequences, starts), read.rows
        rows = Rows(rows.depths, None, rows.row_start, place.block_table, place.lengths)
        features = self.network.fuse(read.features)
        wanted = read.last if drafting else read.last[:0]
        return self.network.forward(read.rows.tokens, features, rows, self._pool, wanted=wanted)

    def _place(self, sequences: Sequence, lengths: Sequence[int]) -> CacheBatch:
        return self._cache.batch([sequence.pages for sequence in sequences], lengths)

    def _children(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens (the target's ids) and their log-probabilities: [rows, k] each."""
        rows, logits = len(hidden), self.network.logits(hidden)
        if rows not in self._expanders:
            self._expanders[rows] = BackboneExpander(rows, 1, logits.shape[1], [self.config.top_k], (), self._device)
        best = self._expanders[rows](logits[:, None], torch.zeros(rows, dtype=torch.int32, device=self._device))
        tokens = best.tokens[:, 1:]
        return tokens if self._tokens is None else self._tokens[tokens.long()], best.scores[:, 1:]

    @staticmethod
    def _state(sequence) -> State:
        if sequence.drafter_state is None:
            sequence.drafter_state = State()
        return sequence.drafter_state


class _Expanded:
    """The rows of B trees whose children are looked at: each one's last true pair, then level by level.

    place: of the pairs before the last.  own_bits: int32 [R, W], row r has bit r.
    """

    def __init__(self, batch: int, place: CacheBatch, own_bits: torch.Tensor) -> None:
        self._batch, self._place, self._own_bits = batch, place, own_bits
        device = own_bits.device
        self._order = torch.arange(batch, device=device)[:, None]
        self._depths = torch.zeros(batch, 1, dtype=torch.int32, device=device)
        self._bits = own_bits[:1].expand(batch, 1, -1)
        self._first = 0  # row of the level that was added last

    def add(self, above: torch.Tensor) -> Rows:
        """A level: above is where in the one before each row's parent is, int64 [B, w]."""
        (batch, width), device = above.shape, above.device
        before = self._order.shape[1]
        after = before + width
        made = torch.arange(batch * before, batch * after, device=device).view(batch, width)
        self._order = torch.cat([self._order, made], dim=1)
        self._depths = torch.cat([self._depths, self._depths[:, -1:].expand(-1, width) + 1], dim=1)
        parents = (self._first + above)[..., None].expand(-1, -1, self._bits.shape[2])
        self._bits = torch.cat([self._bits, self._bits.gather(1, parents) | self._own_bits[before:after]], dim=1)
        self._first = before
        rows = torch.arange(batch * after, device=device).view(batch, after)
        return Rows(
            self._depths.flatten(),
            self._bits.flatten(0, 1),
            torch.arange(0, batch * after + 1, after, dtype=torch.int32, device=device),
            self._place.block_table,
            self._place.lengths,
            self._order.flatten(),
            rows[:, before:].flatten(),
        )


def _own_bits(rows: int) -> torch.Tensor:
    """int32 [rows, ceil(rows / 32)]: row r has bit r."""
    bits = np.zeros((rows, -(-rows // 32)), dtype=np.uint32)
    for row in range(rows):
        bits[row, row // 32] = 1 << row % 32
    return torch.from_numpy(bits.view(np.int32))
