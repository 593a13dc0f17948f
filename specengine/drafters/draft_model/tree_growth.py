"""Trees that grow level by level, and how the children of their nodes are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.ops.draw_siblings import draw_siblings
from specengine.ops.row_tools import likeliest, take_rows
from specengine.ops.sampling_table import SamplingTable, TokenHistory

if TYPE_CHECKING:
    from specengine.engine.request import Request


@dataclass
class Growth:
    """A request's tree while it grows. slot: of the request in its batch.  depth: levels it may have.

    rows: per node, the row of its children's distribution, or -1.  open: the nodes whose children come next.
    """

    request: Request
    slot: int
    depth: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    rows: list[int] = field(default_factory=lambda: [-1])
    open: list[int] = field(default_factory=lambda: [0])

    @property
    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents)

    def add(self, parent: int, token: int) -> int:
        """The number of the new node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.rows.append(-1)
        return len(self.tokens) - 1


# choose(logits [R, V], (slot, node) of each row, all trees so far, children per node) -> the children of each row
Choice = Callable[[torch.Tensor, list[tuple[int, int]], list[Growth], int], list[list[int]]]


def likeliest_children(logits: torch.Tensor, nodes, trees, count: int) -> list[list[int]]:
    """A Choice: the likeliest tokens."""
    return likeliest(logits, count)


def drawn_children(requests: Sequence[Request], replacement: bool, device: torch.device, noise: float = 0.0) -> Choice:
    """A Choice: tokens drawn from the distributions that the sampling parameters make of the logits.

    noise: 0: with noise of their own, else as the rule `match` draws, but at so much of the temperature.
    """
    params = SamplingTable.of([s.params for s in requests], [s.seed for s in requests]).to(device)
    if noise:
        params = replace(params, temperature=noise * params.temperature)
    longest = max((len(s.tokens) for s in requests), default=1)
    history = TokenHistory.of([s.tokens for s in requests], [s.prompt_length for s in requests], longest).to(device)

    def choose(logits: torch.Tensor, nodes: list[tuple[int, int]], trees: list[Growth], count: int) -> list[list[int]]:
        slots, own = (torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*nodes, strict=True))
        tree = TreeBatch.of([growth.tree for growth in trees], device)
        drawn = draw_siblings(logits, own, tree, slots, params, history, count, replacement, as_match=noise > 0)
        return [[token for token in row if token >= 0] for row in drawn.tolist()]

    return choose


def agreeing_children(requests: Sequence[Request], noise: float, device: torch.device) -> Choice:
    """A Choice: what the rule `match` would draw of these distributions at `noise` times the temperature; where that is
    0 the likeliest tokens."""
    if not noise or not any(s.params.temperature for s in requests):
        return likeliest_children
    draw = drawn_children(requests, False, device, noise)

    def choose(logits: torch.Tensor, nodes: list[tuple[int, int]], trees: list[Growth], count: int) -> list[list[int]]:
        children = draw(logits, nodes, trees, count)
        greedy = [row for row, (slot, _) in enumerate(nodes) if not requests[slot].params.temperature]
        for row, tokens in zip(greedy, likeliest(take_rows(logits, greedy), count), strict=True):
            children[row] = tokens
        return children

    return choose
