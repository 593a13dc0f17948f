"""Cuts trees to the nodes that pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specengine import _C
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree


def cut_trees(trees: Sequence[ScoredTree], price: float, seconds: Callable[[int], float], most: int) -> list[DraftTree]:
    """Returns the trees with those nodes for which expected tokens less the price of the cycle's seconds are most.

    price: tokens that a second must bring; 0: every node pays.  seconds: of a cycle by its nodes, no roots counted.
    most: nodes of a tree, root excluded.
    """
    nodes = sum(min(len(tree.tokens) - 1, most) for tree in trees)
    costs = [price * seconds(count) for count in range(nodes + 1)]
    return [DraftTree(*kept) for kept in _C.cut_trees([tree.columns for tree in trees], costs, most)]


def expected_tokens(trees: Sequence[ScoredTree], cut: Sequence[DraftTree]) -> float:
    """Returns how many nodes of cut trees will be accepted in the mean: each tree keeps its likeliest nodes."""
    total = 0.0
    for tree, kept in zip(trees, cut, strict=True):
        reached = [1.0]
        for parent, chance in zip(tree.parents[1:], tree.chances[1:], strict=True):
            reached.append(reached[parent] * chance)
        total += sum(sorted(reached[1:], reverse=True)[: len(kept.tokens) - 1])
    return total
