"""A model drafts: any with the target's vocabulary, or the target's own first layers.

Its cache keeps what was committed. A chain goes on row by row, and the keys of what is accepted stay; a tree is passed
again for every level, as its rows are nearly free, and leaves nothing that would have to be moved.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch

from specengine._C import MAX_NODES
from specengine.drafters.base import Drafter
from specengine.drafting.shipped import shipped
from specengine.drafting.tree_growth import Choice, Growth, agreeing_children, drawn_children, likeliest_children
from specengine.json_file import read_json_object
from specengine.kv_cache import KVCache
from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.models.loading import load_model
from specengine.models.transformer import Transformer
from specengine.ops.row_tools import confidence, stack_rows, take_rows
from specengine.options import check_range
from specengine.rules.base import Wants
from specengine.text import Tokenizer
from specengine.tree import DraftLogits, DraftTree, TreeBatch

SELF = "self"  # the path that stands for the target


@dataclass(frozen=True)
class Config:
    """length: tokens of the chain drafted.  tree: instead of a chain, the children of each node by level, as 3x2x1.
    replacement: siblings are drawn with replacement, where a rule wants them sampled.
    noise: where the rule wants no samples, children are what `match` would draw from the draft model's distribution at
    so much of the temperature, with the noise of the target's own draw there. The worse the two models agree, the less
    noise is best; 0: the likeliest tokens at any temperature, which suits `margin:strict`.
    confidence: nothing is drafted behind a node whose likeliest continuation has a lower probability, by the draft
    model's unprocessed logits. That is known before any child is drawn, so it cannot bias a rule.
    layers: the model's first so many, 0: all.  dtype: of a model that is loaded, as the engine's.
    """

    length: int = 4
    tree: str = ""
    replacement: bool = False
    noise: float = 0.75
    confidence: float = 0.0
    layers: int = 0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_range("length", self.length, 1, MAX_NODES - 1)
        check_range("layers", self.layers, 0, 10_000)
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence: expected a probability, got {self.confidence!r}")
        if self.noise != 0 and not 0.01 <= self.noise <= 1:
            raise ValueError(f"noise: expected 0 or a number from 0.01 to 1, got {self.noise!r}")
        if not re.fullmatch(r"([1-9]\d{0,2}(x[1-9]\d{0,2})*)?", self.tree):
            raise ValueError(f"tree: expected the children of each node by level, such as 3x2x1, got {self.tree!r}")
        if self.nodes > MAX_NODES:
            raise ValueError(
                f"tree: {self.tree} has {self.nodes} nodes with its root, at most {MAX_NODES} are possible"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Children of each node by level."""
        return tuple(int(width) for width in self.tree.split("x")) if self.tree else (1,) * self.length

    @property
    def nodes(self) -> int:
        """Of the whole tree, root included."""
        return 1 + sum(accumulate(self.widths, mul))


@dataclass
class State:
    """What the cache holds of a sequence: `cached` committed tokens, then the drafted tokens `ahead`."""

    pages: list[int]
    cached: int = 0
    ahead: list[int] = field(default_factory=list)

    def settle(self, tokens: Sequence[int]) -> None:
        """Counts what was drafted and has been committed; never the last token, whose logits are wanted (again)."""
        self.cached = min(self.cached, len(tokens) - 1)
        for token in self.ahead:
            if self.cached == len(tokens) - 1 or tokens[self.cached] != token:
                break
            self.cached += 1
        self.ahead = []


class DraftModel(Drafter):
    """Drafts what a cheaper model would say: the likeliest tokens, or tokens drawn from its distributions.

    model: the one that drafts.
    """

    name = "draft_model"
    Config = Config
    takes_path = True
    offers = frozenset(Wants)

    def __init__(self, config: Config, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        self.model, self._tokenizer = _open(config, path, target)
        ours, theirs = self.model.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise ValueError(f"drafter: {path} has a vocabulary of {ours} tokens, the target has {theirs}")
        check_range("tree", max(config.widths), 1, ours)
        self._path, self._chain = path, max(config.widths) == 1
        self._cache = self.model.new_cache()

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None or self._tokenizer is None:
            return
        token = tokenizer.first_difference(self._tokenizer)
        if token is not None:
            ours, theirs = self._tokenizer.token_text(token), tokenizer.token_text(token)
            raise ValueError(f"drafter: token {token} is {ours!r} in {self._path} and {theirs!r} in the target")

    @property
    def drafts_chains(self) -> bool:
        return self._chain

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    @property
    def page_bytes(self) -> int:
        return self._cache.page_bytes

    def attach(self, cache: KVCache) -> None:
        if cache.fixed:
            self._attach_once()
            self.model.tune()
            self._cache = self.model.new_cache(cache.k.shape[1])

    def release(self, sequence) -> None:
        state, sequence.drafter_state = sequence.drafter_state, None
        if state is not None:
            self._cache.free(state.pages)

    def draft(self, sequences: Sequence) -> list[DraftTree]:
        choose = agreeing_children(sequences, self.config.noise, self.model.device)
        return [growth.tree for growth in self._grow(sequences, choose)[0]]

    def draft_with_logits(self, sequences: Sequence, sampled: bool) -> tuple[list[DraftTree], DraftLogits]:
        device, replacement = self.model.device, self.config.replacement
        choose = drawn_children(sequences, replacement, device) if sampled else likeliest_children
        trees, logits = self._grow(sequences, choose)
        rows = torch.tensor([row for growth in trees for row in growth.rows], dtype=torch.int32, device=device)
        return [growth.tree for growth in trees], DraftLogits(stack_rows(logits), rows, replacement=replacement)

    def room_for_logits(self, nodes: int) -> DraftLogits:
        device = self.model.device
        logits = torch.zeros(nodes, self.model.config.vocab_size, device=device)
        rows = torch.full((nodes,), -1, dtype=torch.int32, device=device)
        return DraftLogits(logits, rows, replacement=self.config.replacement)

    def _grow(self, sequences: Sequence, choose: Choice) -> tuple[list[Growth], list[torch.Tensor]]:
        """The trees of a batch, and all distributions that were looked at on the way, level by level."""
        trees = [Growth(s, b, self._depth(s), [s.tokens[-1]]) for b, s in enumerate(sequences)]
        levels = [torch.empty(0, self.model.config.vocab_size, device=self.model.device)]
        known = 0
        for level, width in enumerate(self.config.widths):
            growing = [growth for growth in trees if growth.open and level < growth.depth]
            if not growing:
                break
            logits = self._logits(growing, level)
            nodes = [(growth.slot, node) for growth in growing for node in growth.open]
            chosen = choose(logits, nodes, trees, width)
            for growth in growing:
                growth.open = []
            for (slot, node), tokens, sure in zip(nodes, chosen, self._sure(logits), strict=True):
                growth = trees[slot]
                growth.rows[node] = known
                known += 1
                growth.open += [growth.add(node, token) for token in tokens if sure]
            levels.append(logits)
        return trees, levels

    def _depth(self, sequence) -> int:
        """Levels worth drafting, as far as the draft model's own context goes."""
        return min(sequence.draft_limit, self.model.config.max_position - len(sequence.tokens) + 1)

    def _sure(self, logits: torch.Tensor) -> list[bool]:
        if not self.config.confidence:
            return [True] * len(logits)
        return [probability >= self.config.confidence for probability in confidence(logits)]

    def _logits(self, growing: list[Growth], level: int) -> torch.Tensor:
        """One pass: logits [R, V] of all open nodes."""
        model, device = self.model, self.model.device
        states = [self._state(growth.sequence) for growth in growing]
        if level == 0:  # what was committed since the last draft; its last token is the root
            self._catch_up(growing, states)
            runs = [growth.sequence.tokens[state.cached :] for growth, state in zip(growing, states, strict=True)]
            rows, open_rows = TreeBatch.chains(runs, device), [[len(run) - 1] for run in runs]
            starts = [state.cached for state in states]
        elif self._chain:
            runs = [growth.tokens[-1:] for growth in growing]
            rows, open_rows = TreeBatch.chains(runs, device), [[0]] * len(runs)
            starts = [state.cached + len(state.ahead) for state in states]
        else:
            runs = [growth.tokens for growth in growing]
            rows, open_rows = TreeBatch.of([growth.tree for growth in growing], device), [g.open for g in growing]
            starts = [state.cached - 1 for state in states]  # from the root on
        features = model.hidden(rows, self._cache, self._cache.batch([state.pages for state in states], starts))
        for growth, state in zip(growing, states, strict=True):
            if level == 0:
                state.cached = len(growth.sequence.tokens)
            elif self._chain:
                state.ahead.append(growth.tokens[-1])
        first = accumulate((len(run) for run in runs), initial=0)
        picked = [start + row for start, own in zip(first, open_rows, strict=False) for row in own]
        return model.logits(take_rows(features, picked))

    def _state(self, sequence) -> State:
        if sequence.drafter_state is None:
            longest = sequence.prompt_length + sequence.limit
            self.model.ensure_positions(min(longest, self.model.config.max_position))
            sequence.drafter_state = State(self._cache.allocate(longest + self.max_nodes))
        return sequence.drafter_state

    def _catch_up(self, growing: list[Growth], states: list[State]) -> None:
        """Passes what is more than one pass of the batch should hold: prompts."""
        step = self.model.ops.prefill_rows
        most = max(len(self.config.widths) + 1, step // len(growing))  # what a cycle commits always fits
        for growth, state in zip(growing, states, strict=True):
            tokens = growth.sequence.tokens
            state.settle(tokens)
            while (waiting := len(tokens) - state.cached) > most:
                run = tokens[state.cached : state.cached + min(step, waiting - most)]
                rows = TreeBatch.chains([run], self.model.device)
                self.model.hidden(rows, self._cache, self._cache.batch([state.pages], [state.cached]))
                state.cached += len(run)


def _open(config: Config, path: str | None, target: Transformer) -> tuple[Transformer, Tokenizer | None]:
    """The model that drafts, and its tokenizer where that is not the target's own."""
    if path is None and (found := shipped(DraftModel.name, target)) is not None:
        path = str(found)
    if path is None:
        raise ValueError(
            "drafter: draft-model:MODEL takes a model with the target's vocabulary, "
            "draft-model:self,layers=N the target's own first layers"
        )
    if path != SELF:
        model, tokenizer = _load(path, config.dtype, target)
        return model.first_layers(config.layers) if config.layers else model, tokenizer
    if config.dtype != "auto":
        raise ValueError(f"drafter: dtype: the target's layers are what they are, got {config.dtype!r}")
    return target.first_layers(config.layers), None  # refuses 0: the whole target would draft nothing faster


def _load(path: str, dtype: str, target: Transformer) -> tuple[Transformer, Tokenizer | None]:
    """The model beside the target."""
    if _shares(path):
        return target.with_layers(open_draft_checkpoint(path), dtype), None
    loaded = load_model(path, device=target.device.type, dtype=dtype, ops=target.ops)
    return loaded.target, loaded.tokenizer


def _shares(path: str) -> bool:
    """Whether it is a folder of layers alone, to stand between the target's embedding and head."""
    config = Path(path) / "config.json"
    return config.is_file() and bool(read_json_object(config).get("shared_with_target"))
