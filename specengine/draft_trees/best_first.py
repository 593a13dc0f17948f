"""Trees that grow from the likeliest node on: those of DDTree and of JetSpec.

Both read, of every node, its likeliest children and their log-probabilities. A head that drafts all levels at once
gives every node of a level the same children.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import exp

from specengine.draft_trees.scored_tree import ScoredTree

# Takes a node's number, its parent's (-1: it is the root), its depth and token; returns its children's tokens and
# log-probabilities, likeliest first.
Expand = Callable[[int, int, int, int], tuple[Sequence[int], Sequence[float]]]


class GrowingTree:
    """Holds the nodes of a tree while it grows. depths: of every node, 0 for the root."""

    def __init__(self, root: int, expand: Expand) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self._log_probs, self._expand = [0.0], expand

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> tuple[Sequence[int], Sequence[float]]:
        """Returns the likeliest children of a node."""
        return self._expand(node, self.parents[node], self.depths[node], self.tokens[node])

    def add(self, parent: int, token: int, log_prob: float) -> int:
        """Adds a node; returns its number. log_prob: given its parent."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self._log_probs.append(log_prob)
        return len(self.tokens) - 1

    @property
    def scored(self) -> ScoredTree:
        """The tree, with the probability of every node given its parent."""
        return ScoredTree(self.tokens, self.parents, [exp(log_prob) for log_prob in self._log_probs])


def ddtree(root: int, expand: Expand, nodes: int, levels: int) -> ScoredTree:
    """Returns the `nodes` - 1 likeliest prefixes below a root, the likeliest first (Ringel and Romano, DDTree).

    Of equal probabilities the one with the lower ranks is first.
    """
    tree = GrowingTree(root, expand)
    candidates: list[tuple[float, tuple[int, ...], int]] = []  # negative score, ranks on the path, parent
    listed: list[tuple[Sequence[int], Sequence[float]]] = []  # children of every node
    scores = [0.0]

    def push(parent: int, ranks: tuple[int, ...]) -> None:
        log_probs = listed[parent][1]
        if ranks[-1] < len(log_probs):
            heapq.heappush(candidates, (-(scores[parent] + log_probs[ranks[-1]]), ranks, parent))

    def open_node(node: int, ranks: tuple[int, ...]) -> None:
        listed.append(tree.children(node) if tree.depths[node] < levels else ((), ()))
        push(node, (*ranks, 0))

    open_node(0, ())
    while candidates and len(tree) < nodes:
        score, ranks, parent = heapq.heappop(candidates)
        tokens, log_probs = listed[parent]
        scores.append(-score)
        node = tree.add(parent, tokens[ranks[-1]], log_probs[ranks[-1]])
        push(parent, (*ranks[:-1], ranks[-1] + 1))
        if len(tree) < nodes:
            open_node(node, ranks)
    return tree.scored


def jetspec_tree(root: int, expand: Expand, nodes: int, levels: int) -> ScoredTree:
    """Returns JetSpec's tree of at most `nodes` nodes, root included: the likeliest node gets all its children at once.

    Of equal probabilities the earlier node is first. The last node may get only its first children.
    """
    tree = GrowingTree(root, expand)
    candidates = [(-0.0, 0)]
    while candidates and len(tree) < nodes:
        score, parent = heapq.heappop(candidates)
        if tree.depths[parent] == levels:
            continue
        for token, log_prob in list(zip(*tree.children(parent), strict=True))[: nodes - len(tree)]:
            heapq.heappush(candidates, (score - log_prob, tree.add(parent, token, log_prob)))
    return tree.scored
