"""Trees whose nodes have chances, and their comparison with the committed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specengine import _C


class Tree(Protocol):
    """Nodes of a tree, as DraftTree has them."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def parents(self) -> Sequence[int]: ...


def tree_levels(parents: Sequence[int]) -> int:
    """Returns the depth of a tree's deepest node, of every node's parent."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


@dataclass(frozen=True)
class ScoredTree:
    """A tree as DraftTree has it. chances: the probability of each node, once its parent is accepted."""

    tokens: Sequence[int]
    parents: Sequence[int]
    chances: Sequence[float]

    @property
    def levels(self) -> int:
        """Depth of the deepest node."""
        return tree_levels(self.parents)

    @property
    def columns(self) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
        """Tokens, parents and chances."""
        return self.tokens, self.parents, self.chances

    @staticmethod
    def root(token: int) -> ScoredTree:
        """Returns the tree of a root alone."""
        return ScoredTree([token], [-1], [1.0])

    def rooted(self, token: int, levels: int) -> ScoredTree:
        """Returns the first `levels` levels below another root.

        Nodes must lie in order of their depth; parents behind the last node are -1.
        """
        depths = [0]
        kept = 1
        for parent in self.parents[1:]:
            if parent < 0 or depths[parent] == levels:
                break
            depths.append(depths[parent] + 1)
            kept += 1
        return ScoredTree([token, *self.tokens[1:kept]], self.parents[:kept], self.chances[:kept])

    def part(self, kept: Sequence[int]) -> ScoredTree:
        """Returns the root and the kept nodes, which are in order and hold every node's parent."""
        nodes = [0, *kept]
        place = {node: i for i, node in enumerate(nodes)}
        parents = [-1, *(place[self.parents[node]] for node in kept)]
        return ScoredTree([self.tokens[node] for node in nodes], parents, [self.chances[node] for node in nodes])


def judge_nodes(tree: Tree, committed: Sequence[int]) -> list[tuple[int, bool]]:
    """Returns every node whose parent the text runs through, and whether the text runs through the node.

    committed: the text behind the root: the accepted tokens and the bonus token.
    """
    return _C.judge_nodes(tree.tokens, tree.parents, committed)
