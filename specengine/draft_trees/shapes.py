"""The shapes of drafted trees: which nodes get children, and which candidates stay.

A shape is known before anything is drafted. drafters/growth.py grows trees by it, on the host and in captured cycles.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from specengine._C import MAX_LEVEL_CHILDREN
from specengine.draft_trees.rank_paths import RankTree


def just_below(chance: float) -> float:
    """Returns the threshold that exactly this chance is above, as a float32."""
    return float(np.nextafter(np.float32(chance), np.float32(0)))


@dataclass(frozen=True)
class Beam:
    """Every level opens the `width` likeliest nodes of the level before (EAGLE-2 section 4.1); all are candidates.

    A tree has `levels` levels, an opened node `children` children. With width 1 and more children it is a backbone
    (FastEagle section 3), with one child a chain.
    widths, thresholds: an opened node has widths[number of thresholds below its first child's chance] children (CAPE,
    GLIDE section 3.3); no thresholds: `children`.
    """

    levels: int
    children: int
    width: int = 1
    widths: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = ()

    def first_levels(self, levels: int) -> Beam:
        """Returns the shape without the deeper levels."""
        return replace(self, levels=min(levels, self.levels))

    @property
    def is_chain(self) -> bool:
        """Whether no node ever has two children."""
        return self.children == 1

    @property
    def opened(self) -> tuple[int, ...]:
        """How many nodes each level's children belong to; 1 of the first level: the root."""
        opened = [1]
        for _ in range(self.levels - 1):
            opened.append(min(self.width, opened[-1] * self.children))
        return tuple(opened)

    @property
    def candidates(self) -> int:
        """Nodes that a tree is chosen from, root included."""
        return 1 + sum(self.opened) * self.children


@dataclass(frozen=True, eq=False)  # arrays have no hash
class Ranks:
    """A tree that is given as rank paths: each node is the child of some rank, or the drawn child of some number.

    widths, thresholds: see Beam; children past their width do not exist.
    """

    tree: RankTree
    widths: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = ()

    def first_levels(self, levels: int) -> Ranks:
        """Returns the shape without the deeper levels."""
        return self if levels >= self.levels else replace(self, tree=self.tree.first(len(self.tree), levels))

    @cached_property
    def levels(self) -> int:
        return int(self.tree.depths.max())

    @cached_property
    def children(self) -> int:
        """Children that the tree needs of a distribution."""
        return 1 + int(self.tree.ranks.max())

    @property
    def is_chain(self) -> bool:
        """Whether no node ever has two children."""
        return len({*self.tree.parents.tolist()}) == len(self.tree)

    @property
    def opened(self) -> tuple[int, ...]:
        """How many nodes each level's children belong to; 1 of the first level: the root."""
        parents = zip(self.tree.depths.tolist(), self.tree.parents.tolist(), strict=True)
        return tuple(Counter(depth for depth, _ in {*parents})[level] for level in range(1, self.levels + 1))

    @property
    def candidates(self) -> int:
        """Nodes of the tree, root included."""
        return 1 + len(self.tree)


@dataclass(frozen=True)
class BestFirst:
    """The likeliest open node is opened next, until the tree has `nodes` nodes, root included.

    kind: `ddtree`, node by node (Ringel and Romano); `jetspec`, all children of a node at once; `top2gap`, the same
    with fewer children the further the likeliest one is ahead, by `beta`.
    """

    kind: str
    levels: int
    nodes: int
    children: int
    beta: float = 1.0

    def first_levels(self, levels: int) -> BestFirst:
        """Returns the shape without the deeper levels."""
        return replace(self, levels=min(levels, self.levels))

    @property
    def is_chain(self) -> bool:
        """Whether no node ever has two children."""
        return self.children == 1

    @property
    def candidates(self) -> int:
        """Nodes of the tree, root included."""
        return self.nodes

    def check_room(self) -> None:
        """Raises ValueError where one launch has no room for the children of all levels, which are known at once."""
        if self.levels * self.children > MAX_LEVEL_CHILDREN:
            raise ValueError(
                f"nodes: {self.levels} levels of {self.children} children, at most {MAX_LEVEL_CHILDREN} together are "
                "supported on cuda; expected fewer levels or fewer nodes"
            )


Shape = Beam | Ranks | BestFirst
