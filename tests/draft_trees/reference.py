"""What the core's functions over drafted trees return, in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from specengine.draft_trees.scored_tree import ScoredTree, Tree
from specengine.draft_trees.tree import DraftTree

SUREST = 0.99


def join_trees(first: ScoredTree, second: ScoredTree, pooled: bool = False) -> ScoredTree:
    tokens, parents, chances = [*first.tokens], [*first.parents], [*first.chances]
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    place, others = [0], [0.0] * len(tokens)
    for token, parent, chance in zip(second.tokens[1:], second.parents[1:], second.chances[1:], strict=True):
        node = children.setdefault((place[parent], token), len(tokens))
        if node == len(tokens):
            tokens.append(token)
            parents.append(place[parent])
            chances.append(chance)
            others.append(chance)
        others[node] = chance
        place.append(node)
    expanded = {parents[node] for node in place}
    for node in range(1, len(tokens)):
        own, other = chances[node], others[node]
        chance = (own + other) / 2 if pooled and parents[node] in expanded else max(own, other)
        chances[node] = min(SUREST, chance)
    return ScoredTree(tokens, parents, chances)


def cut_trees(trees: Sequence[ScoredTree], price: float, seconds: Callable[[int], float], most: int) -> list[DraftTree]:
    likeliest: list[tuple[float, int, int]] = []
    for number, tree in enumerate(trees):
        reach = [1.0] * len(tree.tokens)
        own: list[tuple[float, int, int]] = []
        for node in range(1, len(reach)):
            reach[node] = reach[tree.parents[node]] * tree.chances[node]
            own.append((-reach[node], number, node))  # sorts no node before its parent, equals in drafting order
        likeliest += sorted(own)[:most]
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


def judge_nodes(tree: Tree, committed: Sequence[int]) -> Iterator[tuple[int, bool]]:
    reached = {0: 0}  # nodes on the committed path, and how many tokens lead to them
    for node in range(1, len(tree.tokens)):
        depth = reached.get(tree.parents[node])
        if depth is None or depth == len(committed):
            continue
        accepted = tree.tokens[node] == committed[depth]
        if accepted:
            reached[node] = depth + 1
        yield node, accepted


def count_sources(
    tree: Tree, sources: Sequence[tuple[str, Tree]], accepted: Sequence[int]
) -> list[tuple[str, int, list[int]]]:
    """Returns, by name, the nodes of the tree that its sources drafted, and their places on the accepted path."""
    children = {child: node for node, child in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int | None] = [0]
    for token in accepted:
        path.append(children.get((path[-1], token)))
    nodes: dict[str, set[int | None]] = {}
    for name, source in sources:
        places: list[int | None] = [0]  # in the tree
        for token, parent in zip(source.tokens[1:], source.parents[1:], strict=True):
            places.append(children.get((places[parent], token)))
        nodes.setdefault(name, set()).update(places)
    counts = []
    for name, held in nodes.items():
        held -= {0, None}
        counts.append((name, len(held), [place for place, node in enumerate(path[1:]) if node in held]))
    return counts
