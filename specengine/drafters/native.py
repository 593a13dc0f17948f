"""Drafts of the core's own networks on the CPU: one native call from what a network has not read to whole trees.

csrc/networks says what the networks are made of, and csrc/growth/grow.h how trees grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specengine import _C
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.shapes import Beam, Ranks

Weights = _C.EagleWeights | _C.FastEagleWeights | _C.HeadsWeights | _C.GlideWeights
Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # keys, values, rotary tables
Runs = Sequence[Sequence[int]]


class Unread(NamedTuple):
    """What requests begin a draft with.

    runs: tokens of each request that the network has not read, at least one; the last one is the root.
    hidden_states: float32 [R, columns] or [R, states, columns] of the target, where the network reads them.
    rows: those of all tokens.  pages: of each request.  cached: tokens of each that are read.
    caches: the network's, then the target's, as far as it reads them.
    """

    runs: Runs
    hidden_states: torch.Tensor | None
    rows: Sequence[int]
    pages: Runs
    cached: Sequence[int]
    caches: Sequence[Cache]


def growth_shape(shape: Beam | Ranks, nodes: int = _C.MAX_NODES) -> _C.GrowthShape:
    """Returns a shape as the native loop takes it. nodes: how many a tree keeps, root included; the best ones."""
    if isinstance(shape, Beam):
        return _C.GrowthShape(shape.children, shape.width, nodes, shape.thresholds, shape.widths, (), (), ())
    tree = shape.tree.first(len(shape.tree), shape.levels)  # level by level
    columns = (tuple(column.tolist()) for column in (tree.parents, tree.depths, tree.ranks))
    return _C.GrowthShape(shape.children, 1, nodes, (), (), *columns)


class NativeDraft:
    """Drafts with the weights of one network."""

    def __init__(self, weights: Weights, shape: _C.GrowthShape, rare: float = 0.0) -> None:
        """rare: a node that is reached less often is left out, where levels end by min_gain."""
        self._weights, self._shape, self._rare = weights, shape, rare

    def fetch(self) -> None:
        """Lets threads that wait bring EAGLE's weights near, for a draft that follows soon; returns at once."""
        if isinstance(self._weights, _C.EagleWeights):
            self._weights.fetch()

    def __call__(
        self, unread: Unread, limits: Sequence[int], levels: int, min_gain: float = 0.0
    ) -> tuple[list[ScoredTree], int]:
        """Returns each request's tree in the target's tokens, nodes level by level, and the levels that were drafted.

        limits: deepest level of each tree.  levels: at most.
        min_gain: tokens that a further level must be expected to add, the sum over the requests.
        Raises ValueError for tokens without a page or a position, and for logits that are no distribution.
        """
        rare = self._rare if min_gain else 0.0
        trees, drafted = _C.draft_trees(self._weights, self._shape, *unread, limits, levels, min_gain, rare)
        return [ScoredTree(*tree) for tree in trees], drafted
