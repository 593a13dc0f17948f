"""FastEagle: N cascaded layers guess N tokens from one pass over the target's features (the paper's sections 3 and 4).

Layer i reads layer i - 1's output and its own cache; the first one reads the fused features of a position and the
embedding of the token after it. The target's own head, restricted to frequent tokens, turns each output into guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specengine._C import MAX_NODES
from specengine.cost_model import costs_of
from specengine.drafters.base import Drafter
from specengine.feature_pairs import PairRows, Pairs
from specengine.features import Features
from specengine.kv_cache import CacheBatch, KVCache, page_bytes
from specengine.models.draft_checkpoint import DraftCheckpoint, open_draft_checkpoint
from specengine.models.draft_random import random_fasteagle
from specengine.models.rope import RopeTables
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.expand_backbone import BackboneExpander, BackboneTrees
from specengine.ops.row_tools import take_rows
from specengine.options import check_range
from specengine.resident import Slots
from specengine.resident_pairs import ResidentPairs
from specengine.scored_trees import Drafted, ScoredTree, TreeCutter
from specengine.shipped import find_drafter
from specengine.tree import DraftTree, TreeBatch

NAME = "fasteagle"
READINGS = ("text", "formula")


@dataclass(frozen=True)
class Config:
    """top_k: nodes per level; the first one has children (k = 1: a chain).  levels: of the tree; 0: all there are.
    reading: of the paper's tree size: `text` (levels x top_k and the root) or `formula` (1 + (levels - 1) x top_k).
    adaptive: keep the nodes that pay, else always the whole tree.  dtype: of the drafter's weights, as the engine's.
    """

    top_k: int = 4
    levels: int = 0
    reading: str = "text"
    adaptive: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_range("top_k", self.top_k, 1, MAX_NODES - 1)
        check_range("levels", self.levels, 0, MAX_NODES - 1)
        if self.reading not in READINGS:
            raise ValueError(f"reading: expected {' or '.join(READINGS)}, got {self.reading!r}")


@dataclass
class State:
    """What the drafter remembers of one sequence."""

    pairs: Pairs = field(default_factory=Pairs)
    drafted: Drafted | None = None


class FastEagle(Drafter):
    """Drafts a tree with one pass of its layers; a backbone node's siblings are leaves, whatever they would lead to."""

    name = NAME
    Config = Config
    takes_path = True
    reads_features = True
    drafts_on_device = True

    def __init__(self, config: Config, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        self.network = Cascade(_open(path, target), target, config.dtype)
        self.taps = self.network.taps
        levels = config.levels or self.network.levels
        check_range("levels", levels, 1, self.network.levels)
        self._levels = levels - (config.reading == "formula")
        check_range("levels", self._levels, 1, MAX_NODES - 1)
        check_range("top_k", config.top_k, 1, min(self.network.head.rows, (MAX_NODES - 1) // self._levels))
        self._cutter = TreeCutter(costs_of(target) if config.adaptive else None, NAME)
        self._expanders: dict[int, tuple[BackboneExpander, torch.Tensor]] = {}  # by batch size

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return self.config.top_k == 1

    @property
    def max_nodes(self) -> int:
        return 1 + self.config.top_k * self._levels

    @property
    def page_bytes(self) -> int:
        return self.network.page_bytes

    def attach(self, cache: KVCache) -> None:
        self.network.attach(cache)

    def observe_prompt(self, sequence, start: int, features: Features) -> None:
        state = self._state(sequence)
        state.pairs.add(features.tapped)
        known = state.pairs.count - 1  # the last one is drafted from
        if known:
            self.network.read([sequence], [state.pairs], [known])

    def observe(self, sequences: Sequence, committed: Sequence[list[int]], features: Features) -> None:
        first = 0
        for sequence, tokens in zip(sequences, committed, strict=True):
            state = self._state(sequence)
            state.pairs.add(features.tapped[first : first + len(tokens)])
            first += len(tokens)
            if state.drafted:
                self._cutter.observe(state.drafted, tokens)

    def draft(self, sequences: Sequence) -> list[DraftTree]:
        states = [self._state(sequence) for sequence in sequences]
        ready = [i for i, state in enumerate(states) if state.pairs.count]  # a prompt of one token has no pair yet
        scored = [ScoredTree([sequence.tokens[-1]], [-1], [1.0]) for sequence in sequences]
        if ready:
            pairs = [states[i].pairs for i in ready]
            outputs = self.network.read([sequences[i] for i in ready], pairs, [own.count for own in pairs])
            for i, tree in zip(ready, self._scored(self._expand(outputs[:, : self._levels])), strict=True):
                scored[i] = tree.rooted(sequences[i].tokens[-1], sequences[i].draft_limit)
        prefix = sum(len(sequence.tokens) for sequence in sequences) / max(1, len(sequences))
        for state, drafted in zip(states, self._cutter.cut(scored, prefix), strict=True):
            state.drafted = drafted
        return [state.drafted.tree for state in states]

    def new_device_state(self, slots: int) -> ResidentPairs:
        c = self.network.config
        return ResidentPairs(slots, self._levels + 1, (len(self.taps), c.hidden_size), self.network.device)

    def load(self, state: ResidentPairs, sequences: Sequence) -> None:
        state.load([self._state(sequence).pairs for sequence in sequences])

    def unload(self, state: ResidentPairs, sequences: Sequence) -> None:
        state.unload([self._state(sequence).pairs for sequence in sequences])

    def observe_on_device(self, slots: Slots, features: Features) -> None:
        slots.drafter_state.observe(slots, features.tapped)

    def draft_on_device(self, slots: Slots) -> TreeBatch:
        pairs, history = slots.drafter_state, slots.history
        place = CacheBatch(slots.cache.block_table, pairs.first[: slots.size])
        outputs = self.network.outputs(pairs.rows(slots), place)
        trees = self._expand(outputs[:, : self._levels])
        tokens = self.network.target_ids(trees.tokens)
        tokens[:, :1] = history.tokens.gather(1, history.length[:, None].long() - 1)
        limits = torch.where(pairs.counts[: slots.size] > 0, self._levels, 0)  # nothing read, nothing drafted
        return slots.selected(tokens, trees.parents, trees.depths, trees.scores, limits)

    def _expand(self, outputs: torch.Tensor) -> BackboneTrees:
        """Trees whose root is still to be set, of the layers' outputs [B, levels, hidden]."""
        batch, levels, _ = outputs.shape
        logits = self.network.logits(outputs.flatten(0, 1)).view(batch, levels, -1)
        if batch not in self._expanders:
            device = logits.device
            expander = BackboneExpander(*logits.shape, [self.config.top_k], (), device)
            self._expanders[batch] = (expander, torch.zeros(batch, dtype=torch.int32, device=device))
        expander, roots = self._expanders[batch]
        return expander(logits, roots)

    def _scored(self, trees: BackboneTrees) -> list[ScoredTree]:
        tokens, parents, scores = self.network.target_ids(trees.tokens).tolist(), trees.parents.tolist(), trees.scores
        before = scores.gather(1, trees.parents.clamp(min=0).long())
        return [ScoredTree(*each) for each in zip(tokens, parents, (scores - before).exp_().tolist(), strict=True)]

    @staticmethod
    def _state(sequence) -> State:
        if sequence.drafter_state is None:
            sequence.drafter_state = State()
        return sequence.drafter_state


def _open(path: str | None, target: Transformer) -> DraftCheckpoint:
    kind, _, preset = (path or "").partition(":")
    return random_fasteagle(preset) if kind == "random" else open_draft_checkpoint(find_drafter(NAME, path, target))


class Cascade:
    """The network of a checkpoint, ready to run beside its target.

    Raises ValueError naming what of the checkpoint does not fit the target.
    """

    def __init__(self, checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> None:
        self.config = c = checkpoint.layer_config()
        size, self.levels = c.hidden_size, c.num_layers
        self.taps = checkpoint.feature_layers(target.config)
        checkpoint.expect("fc_features.weight", size, len(self.taps) * size)
        checkpoint.expect("fc_input.weight", size, 2 * size)
        loader = WeightLoader(checkpoint, dtype, target.device, target.ops)
        # Positions go on behind what it was trained with; distances do not.
        layers = [loader.layer_at(f"layers.{i}", c.max_position) for i in range(self.levels)]
        self._target, self._ops = target, target.ops
        self._fusion = loader.packed(self._fused(checkpoint), "fc_input")
        self._ones = torch.ones(size, device=target.device)
        self._norm = loader.vector_if_any("norm.weight")
        # What is cascaded is one decoder; the layers of the paper's ablation lie side by side.
        runs = [[layer] for layer in layers] if checkpoint.fields.get("parallel", bool, False) else [layers]
        self._decoders = [self._ops.decoder(c, None, run, self._ones, range(1, len(run) + 1)) for run in runs]
        vocabulary = checkpoint.vocabulary(target.config)
        self._vocabulary = None if vocabulary is None else vocabulary.int().to(target.device)
        self.head = target.head_rows(self._vocabulary)
        self._rope = RopeTables(c, target.device)
        self._kv_shape = (self.levels, c.num_kv_heads, c.head_dim)

    def _fused(self, checkpoint: DraftCheckpoint) -> torch.Tensor:
        """[hidden, (taps + 1) hidden]: fc_input of fc_features of the normed features, and of the embedding.

        Nothing between them is curved, so it is one matrix, and the norms' weights scale its columns.
        """

        def floats(name: str) -> torch.Tensor:
            return checkpoint.read(f"{name}.weight").float()

        size, both = self.config.hidden_size, floats("fc_input")
        scale = torch.cat([floats(f"fc_norm.{i}") for i in range(len(self.taps))])
        parts = [both[:, :size] @ (floats("fc_features") * scale), both[:, size:]]
        return torch.cat(parts, dim=1)

    def attach(self, cache: KVCache) -> None:
        self._cache = cache
        if cache.fixed:
            self._rope.ensure(self._target.config.max_position)  # a captured graph holds on to the tables
        self._pool = cache.companion(*self._kv_shape, self._target.cache_dtype)

    @property
    def device(self) -> torch.device:
        return self._target.device

    @property
    def page_bytes(self) -> int:
        """Of its keys and values beside a page of the target's."""
        return page_bytes(self._kv_shape, self._target.cache_dtype)

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of the drafter's token ids; -1 stays."""
        return tokens if self._vocabulary is None else torch.where(tokens < 0, tokens, self._vocabulary[tokens.long()])

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """float32 [M, draft vocabulary] of layers' outputs [M, hidden]."""
        if self._norm is not None:
            outputs, rows = torch.empty_like(outputs), outputs.contiguous()
            self._ops.layer.rms_norm(rows, None, self._norm, outputs, self.config.rms_norm_eps)
        return self._ops.linear(outputs.contiguous(), self.head)

    def read(self, sequences: Sequence, pairs: Sequence[Pairs], counts: Sequence[int]) -> torch.Tensor:
        """Reads the first pairs of every sequence: the layers' outputs [B, levels, hidden] at the last of them."""
        starts = [own.first for own in pairs]
        self._rope.ensure(max(start + count for start, count in zip(starts, counts, strict=True)))
        place = self._cache.batch([sequence.pages for sequence in sequences], starts)
        return self.outputs(PairRows.take(sequences, pairs, counts, self._target.device), place)

    @torch.inference_mode()
    def outputs(self, read: PairRows, place: CacheBatch) -> torch.Tensor:
        """The layers' outputs [B, levels, hidden] at every sequence's last pair, once all pairs are cached."""
        inputs, outputs, first = self._inputs(read), [], 0
        for decoder in self._decoders:
            layers = self.levels // len(self._decoders)
            own = slice(first, first + layers)
            first += layers
            tapped = torch.empty(len(inputs), layers, self.config.hidden_size, device=inputs.device)
            caches = (self._pool.k[own], self._pool.v[own], place.block_table, place.lengths)
            decoder(read.rows, *caches, *self._rope.cos_sin, tapped, inputs)
            outputs.append(take_rows(tapped, read.last))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _inputs(self, read: PairRows) -> torch.Tensor:
        """Rows [M, hidden] for the first layer."""
        rows, taps, size = read.features.shape
        normed = torch.empty(rows * taps, size, device=read.features.device)
        self._ops.layer.rms_norm(read.features.flatten(0, 1), None, self._ones, normed, self.config.rms_norm_eps)
        embedded = torch.empty(rows, size, device=normed.device)
        self._ops.layer.gather_rows(self._target.embedding, read.rows.tokens, embedded)
        return self._ops.linear(torch.cat([normed.view(rows, -1), embedded], dim=1), self._fusion)
