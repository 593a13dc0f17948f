"""What a constraint of a request does, whether a grammar or a least length asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specengine.constraints.cut_tree import CutTree
from specengine.draft_trees.tree import DraftTree


class Constraint(Protocol):
    """Says which tokens may follow the committed ones, and which may follow drafted ones."""

    def fresh(self) -> Constraint:
        """Returns the same constraint at the beginning of another text."""

    def cut(self, tree: DraftTree, whole: bool = False) -> CutTree:
        """Leaves out the nodes that are not allowed, and finds the text that must follow where the tree ends.

        whole: keep all nodes.
        """

    def fill(self, tree: DraftTree, rows: np.ndarray) -> None:
        """Writes the mask of every node: which tokens may follow it.

        rows: int32 [nodes, W], contiguous; bit t % 32 of word t // 32 for token t. Rows of nodes that are not allowed
        themselves are all ones: no walk reaches them.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """Goes on by committed tokens. Raises ConstraintFailed where it cannot."""
