"""The shape of a tree before anything is drafted: how many children each node asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.scored_tree import tree_levels


@dataclass(frozen=True)
class TreeShape:
    """The places of a tree's nodes. Place 0 is the root's; every other place comes after its parent's.

    parents: of each place, -1 for the root's. The places of siblings are filled in their order.
    """

    parents: tuple[int, ...]

    @staticmethod
    def of_widths(widths: Sequence[int]) -> TreeShape:
        """Returns the shape whose nodes of level i have widths[i] children each."""
        parents, level = [-1], [0]
        for width in widths:
            first = len(parents)
            parents += [place for place in level for _ in range(width)]
            level = [*range(first, len(parents))]
        return TreeShape(tuple(parents))

    @staticmethod
    def backbone(levels: int, width: int) -> TreeShape:
        """Returns the shape of `levels` levels of `width` nodes, the first of which has children."""
        above = [1 + (level - 1) * width if level else 0 for level in range(levels)]
        return TreeShape((-1, *(parent for parent in above for _ in range(width))))

    @staticmethod
    def of_ranks(tree: RankTree) -> TreeShape:
        """Returns the shape of a tree of rank paths: siblings lie in the order of their ranks, without gaps."""
        order = sorted(range(len(tree)), key=lambda node: (tree.depths[node], tree.ranks[node]))
        place = {0: 0} | {node + 1: number for number, node in enumerate(order, start=1)}
        return TreeShape((-1, *(place[int(tree.parents[node])] for node in order)))

    @cached_property
    def children(self) -> list[list[int]]:
        """The places of each place's children."""
        children: list[list[int]] = [[] for _ in self.parents]
        for place, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(place)
        return children

    @property
    def levels(self) -> int:
        """Depth of the deepest place."""
        return tree_levels(self.parents)
