"""Two drafters' trees with the same root as one tree, in which a node of both appears once."""

from __future__ import annotations

from specengine.draft_trees.scored_tree import ScoredTree


def join_trees(first: ScoredTree, second: ScoredTree, *, pooled: bool = False) -> ScoredTree:
    """Joins two trees with the same root; a node of both has the chance that the surer one gives it.

    pooled: the second drafter knows more. Of a parent that it expanded, a node of the first has the mean of both
    chances, where 0 is the chance of a node that the second leaves out.
    """
    tokens, parents, chances = [*first.tokens], [*first.parents], [*first.chances]
    children = {(first.parents[node], first.tokens[node]): node for node in range(1, len(tokens))}
    place, others = [0], [0.0] * len(tokens)  # chances by the second
    for token, parent, chance in zip(second.tokens[1:], second.parents[1:], second.chances[1:], strict=True):
        parent = place[parent]
        node = children.setdefault((parent, token), len(tokens))
        if node == len(tokens):
            tokens.append(token)
            parents.append(parent)
            chances.append(chance)
            others.append(chance)
        others[node] = chance
        place.append(node)
    expanded = {parents[node] for node in place}
    for node in range(1, len(tokens)):
        own, other = chances[node], others[node]
        chances[node] = (own + other) / 2 if pooled and parents[node] in expanded else max(own, other)
    return ScoredTree(tokens, parents, chances)
