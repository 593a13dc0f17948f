"""Trees that grow level by level, and the ways to choose the children of their nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.engine_views import DraftRequest
from specengine.ops.draw_siblings import draw_siblings
from specengine.ops.row_tools import likeliest, take_rows
from specengine.ops.sampling_table import SamplingTable, TokenHistory


@dataclass
class Growth:
    """A request's tree while it grows.

    slot: of the request in its batch.  depth: levels that the tree may have.  places: of the nodes in their TreeShape.
    rows: per node, the row of its children's distribution, or -1.  open: the nodes whose children come next.
    """

    request: DraftRequest
    slot: int
    depth: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    places: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=lambda: [-1])
    open: list[int] = field(default_factory=lambda: [0])

    @property
    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents)

    def add(self, parent: int, token: int, place: int) -> int:
        """Adds a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.places.append(place)
        self.rows.append(-1)
        return len(self.tokens) - 1


# choose(logits [R, Vd], (slot, node) of each row, all trees so far, children per node) -> the children of each row
Choice = Callable[[torch.Tensor, list[tuple[int, int]], list[Growth], int], list[list[int]]]


def likeliest_children(columns: Columns) -> Choice:
    """Returns a Choice of the likeliest tokens."""

    def choose(logits: torch.Tensor, nodes: list[tuple[int, int]], trees: list[Growth], count: int) -> list[list[int]]:
        return columns.token_ids(likeliest(logits, min(count, columns.count)))

    return choose


def drawn_children(
    requests: Sequence[DraftRequest],
    replacement: bool,
    columns: Columns,
    device: torch.device,
    noise: float = 0.0,
) -> Choice:
    """Returns a Choice that draws from the distributions that the sampling parameters make of the logits.

    noise: 0: with noise of its own; otherwise as the rule `match` draws, at `noise` times the temperature.
    """
    params = SamplingTable.of([s.params for s in requests], [s.seed for s in requests]).to(device)
    if noise:
        params = replace(params, temperature=noise * params.temperature)
    longest = max((len(s.tokens) for s in requests), default=1)
    history = TokenHistory.of([s.tokens for s in requests], [s.prompt_length for s in requests], longest).to(device)

    def choose(logits: torch.Tensor, nodes: list[tuple[int, int]], trees: list[Growth], count: int) -> list[list[int]]:
        slots, own = (torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*nodes, strict=True))
        tree = TreeBatch.of([growth.tree for growth in trees], device)
        where = (logits, own, tree, slots, params, history, count, replacement)
        drawn = draw_siblings(*where, index=columns.index, as_match=noise > 0)
        return [[token for token in row if token >= 0] for row in drawn.tolist()]

    return choose


def agreeing_children(requests: Sequence[DraftRequest], noise: float, columns: Columns, device: torch.device) -> Choice:
    """Returns a Choice that draws as the rule `match` would, at `noise` times the temperature.

    Where that is 0 it chooses the likeliest tokens.
    """
    choose_likeliest = likeliest_children(columns)
    if not noise or not any(s.params.temperature for s in requests):
        return choose_likeliest
    draw = drawn_children(requests, False, columns, device, noise)

    def choose(logits: torch.Tensor, nodes: list[tuple[int, int]], trees: list[Growth], count: int) -> list[list[int]]:
        children = draw(logits, nodes, trees, count)
        greedy = [row for row, (slot, _) in enumerate(nodes) if not requests[slot].params.temperature]
        rows, own = take_rows(logits, greedy), [nodes[row] for row in greedy]
        for row, tokens in zip(greedy, choose_likeliest(rows, own, trees, count), strict=True):
            children[row] = tokens
        return children

    return choose
