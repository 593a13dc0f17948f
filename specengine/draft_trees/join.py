"""Two drafters' trees with the same root as one tree, in which a node of both appears once."""

from __future__ import annotations

from specengine import _C
from specengine.draft_trees.scored_tree import ScoredTree


def join_trees(first: ScoredTree, second: ScoredTree) -> ScoredTree:
    """Joins two trees with the same root. A node of both has the higher chance; no chance is above 0.99."""
    return ScoredTree(*_C.join_trees(first.columns, second.columns))
