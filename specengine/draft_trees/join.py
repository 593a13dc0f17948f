"""Two drafters' trees with the same root as one tree, in which a node of both appears once."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.draft_trees.scored_tree import ScoredTree


@dataclass(frozen=True)
class JoinedTree:
    """tokens, parents: of the joint tree.  chances: of each node, by the first and by the second tree; 0: not there.

    inner: nodes that have children in the first, and in the second tree.
    """

    tokens: list[int]
    parents: list[int]
    chances: list[list[float]]
    inner: tuple[set[int], set[int]]


def join_trees(first: ScoredTree, second: ScoredTree) -> JoinedTree:
    """Joins two trees with the same root."""
    tokens = list(first.tokens)
    parents = list(first.parents)
    chances = [[chance, 0.0] for chance in first.chances]
    children = {(first.parents[node], first.tokens[node]): node for node in range(1, len(tokens))}
    inner: set[int] = set()
    place = [0]
    for token, parent, chance in zip(second.tokens[1:], second.parents[1:], second.chances[1:], strict=True):
        parent = place[parent]
        node = children.setdefault((parent, token), len(tokens))
        if node == len(tokens):
            tokens.append(token)
            parents.append(parent)
            chances.append([0.0, 0.0])
        chances[node][1] = chance
        inner.add(parent)
        place.append(node)
    return JoinedTree(tokens, parents, chances, (set(first.parents), inner))
