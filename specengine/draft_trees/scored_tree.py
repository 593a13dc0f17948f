"""Trees whose nodes have chances: compared with the text, and cut to the nodes that pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.tree_choice import choose_nodes
from specengine.draft_trees.tree import DraftTree


@dataclass(frozen=True)
class ScoredTree:
    """A tree as DraftTree has it. chances: the probability of each node, once its parent is accepted."""

    tokens: Sequence[int]
    parents: Sequence[int]
    chances: Sequence[float]

    @staticmethod
    def root(token: int) -> ScoredTree:
        """A tree of nothing else."""
        return ScoredTree([token], [-1], [1.0])

    def rooted(self, token: int, levels: int) -> ScoredTree:
        """The same below another root, as far as `levels` go; nodes lie in order of their depth, -1 behind the last."""
        depths, kept = [0], 1
        for parent in self.parents[1:]:
            if parent < 0 or depths[parent] == levels:
                break
            depths.append(depths[parent] + 1)
            kept += 1
        return ScoredTree([token, *self.tokens[1:kept]], self.parents[:kept], self.chances[:kept])

    def part(self, kept: Sequence[int]) -> ScoredTree:
        """The root and the kept nodes, which are in order and hold every node's parent."""
        nodes = [0, *kept]
        place = {node: i for i, node in enumerate(nodes)}
        parents = [-1, *(place[self.parents[node]] for node in kept)]
        return ScoredTree([self.tokens[node] for node in nodes], parents, [self.chances[node] for node in nodes])


def judged(tree: ScoredTree, committed: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Every node whose parent the text ran through, and whether it did through the node.

    committed: what the text is behind the root: the accepted tokens and the one after them.
    """
    reached = {0: 0}  # nodes on the committed path, and how many tokens lead to them
    for node in range(1, len(tree.tokens)):
        depth = reached.get(tree.parents[node])
        if depth is None or depth == len(committed):
            continue
        accepted = tree.tokens[node] == committed[depth]
        if accepted:
            reached[node] = depth + 1
        yield node, accepted


@dataclass(frozen=True)
class Cut:
    """Trees of a batch after their cutting. nodes: of all, beside the roots.  expected: tokens that they all bring."""

    trees: list[DraftTree]
    nodes: int
    expected: float


def cut_trees(
    trees: Sequence[ScoredTree], costs: CostModel | None, prefix: float = 0.0, most: int | None = None
) -> Cut:
    """As many of the likeliest nodes as pay. costs: of a target pass; None: all of them pay.
    prefix: tokens in the cache, the mean of the batch.  most: nodes of a tree, beside the root."""
    if all(len(tree.tokens) == 1 for tree in trees):
        return Cut([DraftTree(tree.tokens, tree.parents) for tree in trees], 0, float(len(trees)))
    orders, falling = [], []
    for tree in trees:
        reach = [1.0] * len(tree.tokens)
        for node in range(1, len(reach)):
            reach[node] = reach[tree.parents[node]] * tree.chances[node]
        order = sorted(range(1, len(reach)), key=lambda node: -reach[node])[:most]  # no node before its parent
        orders.append(order)
        falling.append([reach[node] for node in order])
    counts = [len(order) for order in orders] if costs is None else choose_nodes(falling, costs, prefix)
    parts = [tree.part(sorted(order[:count])) for tree, order, count in zip(trees, orders, counts, strict=True)]
    return Cut(
        [DraftTree(part.tokens, part.parents) for part in parts],
        sum(counts),
        sum(1 + sum(chances[:count]) for chances, count in zip(falling, counts, strict=True)),
    )
