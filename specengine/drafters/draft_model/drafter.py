"""A model drafts: any with the target's vocabulary, or the target's own first layers.

Its cache keeps what was committed. A chain goes on row by row, and the keys of what is accepted stay; a tree is passed
again for every level, as its rows are nearly free, and leaves nothing that would have to be moved.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch

from specengine._C import MAX_NODES
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.drafters.draft_model.small_model import SmallModelDrafter, State, check_noise
from specengine.drafters.draft_model.tree_growth import (
    Choice,
    Growth,
    agreeing_children,
    drawn_children,
    likeliest_children,
)
from specengine.drafters.tried_drafter import TriedDrafter
from specengine.models.transformer import Transformer
from specengine.ops.row_tools import confidence, stack_rows, take_rows
from specengine.rules.base import Wants
from specengine.utils.spec_string import check_range


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
    adaptive: where the rule wants no samples, leave out cycles in which drafting does not pay.
    """

    length: int = 4
    tree: str = ""
    replacement: bool = False
    noise: float = 0.75
    confidence: float = 0.0
    layers: int = 0
    dtype: str = "auto"
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_range("length", self.length, 1, MAX_NODES - 1)
        check_range("layers", self.layers, 0, 10_000)
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence: expected a probability, got {self.confidence!r}")
        check_noise(self.noise)
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


class DraftModel(SmallModelDrafter, TriedDrafter):
    """Drafts what a cheaper model would say: the likeliest tokens, or tokens drawn from its distributions.

    costs: what the target's rows cost; by default measured.
    """

    name = "draft_model"
    config_type = Config
    config: Config
    offers = frozenset(Wants)

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CostModel | None = None) -> None:
        super().__init__(config, path, target)
        self._try(target, costs)
        check_range("tree", max(config.widths), 1, self.model.config.vocab_size)
        self._chain = max(config.widths) == 1

    @property
    def drafts_chains(self) -> bool:
        return self._chain

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    def _trees(self, requests: Sequence, paused: bool) -> list[DraftTree]:
        if paused:
            return [DraftTree(request.tokens[-1:], [-1]) for request in requests]
        choose = agreeing_children(requests, self.config.noise, self.model.device)
        return [growth.tree for growth in self._grow(requests, choose)[0]]

    def draft_with_logits(self, requests: Sequence, sampled: bool) -> tuple[list[DraftTree], DraftLogits]:
        device, replacement = self.model.device, self.config.replacement
        choose = drawn_children(requests, replacement, device) if sampled else likeliest_children
        trees, logits = self._grow(requests, choose)
        rows = torch.tensor([row for growth in trees for row in growth.rows], dtype=torch.int32, device=device)
        return [growth.tree for growth in trees], DraftLogits(stack_rows(logits), rows, replacement=replacement)

    def room_for_logits(self, nodes: int) -> DraftLogits:
        device = self.model.device
        logits = torch.zeros(nodes, self.model.config.vocab_size, device=device)
        rows = torch.full((nodes,), -1, dtype=torch.int32, device=device)
        return DraftLogits(logits, rows, replacement=self.config.replacement)

    def _grow(self, requests: Sequence, choose: Choice) -> tuple[list[Growth], list[torch.Tensor]]:
        """The trees of a batch, and all distributions that were looked at on the way, level by level."""
        trees = [Growth(s, b, self._depth(s), [s.tokens[-1]]) for b, s in enumerate(requests)]
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

    def _sure(self, logits: torch.Tensor) -> list[bool]:
        if not self.config.confidence:
            return [True] * len(logits)
        return [probability >= self.config.confidence for probability in confidence(logits)]

    def _logits(self, growing: list[Growth], level: int) -> torch.Tensor:
        """One pass: logits [R, V] of all open nodes."""
        model, device = self.model, self.model.device
        states = [self._state(growth.request) for growth in growing]
        if level == 0:  # what was committed since the last draft; its last token is the root
            cycle = len(self.config.widths) + 1  # what it commits always fits
            most = max(cycle, model.ops.prefill_rows // len(growing))
            self._catch_up([growth.request for growth in growing], states, most)
            runs = [growth.request.tokens[state.cached :] for growth, state in zip(growing, states, strict=True)]
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
        hidden_states = model.hidden(rows, self._cache, self._cache.batch([state.pages for state in states], starts))
        for growth, state in zip(growing, states, strict=True):
            if level == 0:
                state.cached = len(growth.request.tokens)
            elif self._chain:
                state.ahead.append(growth.tokens[-1])
        first = accumulate((len(run) for run in runs), initial=0)
        picked = [start + row for start, own in zip(first, open_rows, strict=False) for row in own]
        return model.logits(take_rows(hidden_states, picked))

    def _state(self, request) -> State:
        if request.drafter_state is None:
            request.drafter_state = State(*self._place(request, self.max_nodes))
        return request.drafter_state
