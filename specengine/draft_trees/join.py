"""Two drafters' trees with the same root as one tree, in which a node of both appears once."""

from __future__ import annotations

from specengine import _C
from specengine.draft_trees.scored_tree import ScoredTree


def join_trees(first: ScoredTree, second: ScoredTree, *, pooled: bool = False) -> ScoredTree:
    """Joins two trees with the same root. A node of both has the higher chance; no chance is above 0.99.

    pooled: the second drafter knows more. Of a parent that it expanded, a node of the first has the mean of both
    chances, where 0 is the chance of a node that the second leaves out.
    """
    return ScoredTree(*_C.join_trees(first.columns, second.columns, pooled))
