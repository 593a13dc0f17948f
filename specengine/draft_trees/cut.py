"""Cuts trees to the nodes that pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree


def cut_trees(trees: Sequence[ScoredTree], price: float, seconds: Callable[[int], float], most: int) -> list[DraftTree]:
    """Returns the trees with those nodes for which expected tokens less the price of the cycle's seconds are most.

    price: tokens that a second must bring; 0: every node pays.  seconds: of a cycle by its nodes, no roots counted.
    most: nodes of a tree, root excluded.
    """
    likeliest: list[tuple[float, int, int]] = []
    for number, tree in enumerate(trees):
        reach = [1.0] * len(tree.tokens)
        own: list[tuple[float, int, int]] = []
        for node in range(1, len(reach)):
            reach[node] = reach[tree.parents[node]] * tree.chances[node]
            own.append((-reach[node], number, node))  # sorts no node before its parent, equals in drafting order
        likeliest += sorted(own)[:most]
    if len(trees) > 1:
        likeliest.sort()
    best = price * -seconds(0)
    expected, taken = 0.0, 0
    for count, (reached, _, _) in enumerate(likeliest, start=1):
        expected -= reached
        value = expected - price * seconds(count)
        if value > best:
            best, taken = value, count
    kept: list[list[int]] = [[] for _ in trees]
    for _, number, node in likeliest[:taken]:
        kept[number].append(node)
    parts = (tree.part(sorted(own)) for tree, own in zip(trees, kept, strict=True))
    return [DraftTree(part.tokens, part.parents) for part in parts]
