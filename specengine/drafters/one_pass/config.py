"""The options of drafters that draft all levels of a tree in one pass."""

from __future__ import annotations

from dataclasses import dataclass

from specengine._C import MAX_NODES
from specengine.draft_trees.shapes import Beam, BestFirst
from specengine.models.transformer import Transformer
from specengine.utils.spec_string import check_range

TREES = ("ddtree", "jetspec", "chain")


@dataclass(frozen=True)
class OnePassConfig:
    """The options.

    length: tokens that a pass drafts, the levels of the tree.
    tree: chain, the likeliest token of each slot; ddtree, the likeliest paths; jetspec, all children of the likeliest
    nodes.
    nodes: of the largest tree, root included. A chain has length + 1.
    top_k: children per node of jetspec.
    adaptive: keep the nodes that pay, otherwise the largest tree.
    dtype: of the drafter's weights, as the engine's.
    sample: draw the children from the drafter's distributions, for rules that read them.
    """

    length: int = 8
    tree: str = "ddtree"
    nodes: int = 60
    top_k: int = 7
    adaptive: bool = True
    dtype: str = "auto"
    sample: bool = False

    def __post_init__(self) -> None:
        check_range("length", self.length, 1, MAX_NODES - 1)
        if self.tree not in TREES:
            raise ValueError(f"tree: expected one of {', '.join(TREES)}, got {self.tree!r}")
        check_range("nodes", self.nodes, 2, MAX_NODES)
        check_range("top_k", self.top_k, 1, MAX_NODES - 1)

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest tree, root included."""
        return 1 + self.length if self.tree == "chain" else self.nodes

    @property
    def levels(self) -> int:
        """Levels of the deepest tree."""
        return min(self.length, self.most_nodes - 1)

    def shape(self, columns: int, target: Transformer) -> Beam | BestFirst:
        """Returns the shape of plain trees. columns: tokens that have logits.

        Raises ValueError where a device has no room for a draft.
        """
        if target.ops.on_device:
            check_range("length", self.length, 1, MAX_NODES // 2 - 1)  # as many masks as tokens that a cycle commits
        if self.tree == "chain":
            return Beam(self.levels, 1)
        children = min(self._ranks, columns)
        shape = BestFirst(self.tree, self.levels, self.nodes, children)
        if target.ops.on_device:
            shape.check_room()
        return shape

    def drawn_shape(self, columns: int) -> Beam:
        """Returns the shape of drawn trees, in which only the first node of a level has children."""
        return Beam(self.levels, min(self._ranks, columns, (self.most_nodes - 1) // self.levels))

    @property
    def _ranks(self) -> int:
        """Likeliest tokens of a slot that a tree may have."""
        return {"chain": 1, "ddtree": self.nodes - 1, "jetspec": min(self.top_k, self.nodes - 1)}[self.tree]
