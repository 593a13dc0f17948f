"""Grows trees: a network gives the logits after open nodes, and their children join the tree, level after level.

    steps = network.draft(opened, levels)
    rows = trees.add(next(steps))  # the children of the roots; rows: the nodes whose children come next
    while rows is not None:
        rows = trees.add(steps.send(rows))

The same loop runs on the host and inside captured cycles. Networks whose draft on the CPU is one native call have it in
csrc/growth/grow.cpp.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import exp
from typing import Any, Protocol

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.ops.decoder import Rows
from specengine.ops.growth.growing_trees import Children, GrownRows, Logits
from specengine.ops.sampling_table import TokenHistory
from specengine.ops.select_nodes import Columns, SelectedTrees, select_nodes

Steps = Generator[Logits | Children, GrownRows, None]


class Begun(Protocol):
    """What trees begin from, of all that a reader opens; see Opened."""

    @property
    def roots(self) -> torch.Tensor | TokenHistory: ...

    @property
    def known(self) -> torch.Tensor: ...

    @property
    def origin(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Opened:
    """What a draft begins from: the text that the network has not read, as rows of its first pass, and the roots.

    last: int64 [B], the row after which each request's draft goes on; of drafters with mask tokens [B * levels], the
    rows of all levels.
    hidden_states: [M, ..], those of pairs, or features of a text (PARD-2); [R, ..] where `above` is given; None: the
    network reads none.
    roots: int32 [B, 1].  known: int32 [B], 0: nothing is drafted for the request.
    pool: the drafter's keys and values.  place: where the rows lie in them.  root_place: the same for drafted rows,
    which are numbered from node 0 on; its lengths count the slots before node 0.
    origin: int64 [B], the rows that the first level's `above` names; None: 0 to B - 1.
    above: int64 [M], the hidden state of each row, or the row after them all: that of masks; None: they are in order.
    """

    rows: Rows
    last: torch.Tensor
    roots: torch.Tensor
    known: torch.Tensor
    pool: PagePool
    place: CacheBatch
    root_place: CacheBatch
    hidden_states: torch.Tensor | None = None
    origin: torch.Tensor | None = None
    above: torch.Tensor | None = None

    @property
    def pairs(self) -> torch.Tensor:
        """The hidden states of pairs."""
        assert self.hidden_states is not None  # of a reader of pairs
        return self.hidden_states


class DraftNetwork(Protocol):
    """The network of a drafter."""

    def draft(self, opened: Any, levels: int) -> Steps:
        """Reads the text, and yields the logits of the roots' children; then those of the rows that it is sent.

        opened: by the reader that goes with it.
        One pass may yield the logits of all levels at once; it is sent no rows then.
        """
        ...


class Growing(Protocol):
    """Trees that grow."""

    def add(self, found: Logits | Children) -> GrownRows | None:
        """Adds the children of the open nodes; returns those whose children come next, None: the trees are whole."""
        ...

    def pays(self, min_gain: float) -> bool:
        """Returns whether one more level is expected to add `min_gain` tokens, the sum over the requests."""
        ...


def grow(steps: Steps, trees: Growing, min_gain: float = 0.0) -> int:
    """Grows trees to their end; returns how often the network was asked: how many levels took its time.

    min_gain: what one more level must be expected to add, the sum over the requests; 0: all levels grow.
    """
    rows, passes = trees.add(next(steps)), 1
    while rows is not None and (not min_gain or trees.pays(min_gain)):
        rows, passes = trees.add(steps.send(rows)), passes + 1
    return passes


def scored_trees(columns: Columns, limits: torch.Tensor, nodes: int) -> list[ScoredTree]:
    """Returns the best `nodes` - 1 candidates below each root, on the host. limits: int32 [B], the deepest levels."""
    scores = columns[3]
    room = SelectedTrees.empty(len(scores), nodes, scores.device)
    best = select_nodes(*columns, limits, room)
    found = []
    chosen = (best.node_counts, best.tokens, best.parents, best.kept, scores)
    for count, own, above, kept, reached in zip(*(column.tolist() for column in chosen), strict=True):
        log = [reached[candidate] for candidate in kept[:count]]
        chances = [exp(score - log[max(0, parent)]) for score, parent in zip(log, above[:count], strict=True)]
        found.append(ScoredTree(own[:count], above[:count], chances))
    return found
