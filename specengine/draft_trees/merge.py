"""A tree made of paths, in which what they share is there once."""

from __future__ import annotations

from collections.abc import Sequence

from specengine._C import MAX_NODES
from specengine.draft_trees.tree import DraftTree


class MergedPaths:
    """Node 0 is the root; a node's children have different tokens."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._children: dict[tuple[int, int], int] = {}

    @property
    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents)

    def child(self, node: int, token: int) -> int | None:
        """A node's child with this token, if it has one."""
        return self._children.get((node, token))

    def add(self, node: int, token: int) -> int:
        """A node's child with this token, which it may have had before."""
        child = self._children.setdefault((node, token), len(self.tokens))
        if child == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(node)
        return child

    def add_path(self, node: int, tokens: Sequence[int]) -> list[int]:
        """The nodes of a path below a node."""
        path = []
        for token in tokens:
            node = self.add(node, token)
            path.append(node)
        return path

    def add_phrases(self, node: int, phrases: Sequence[Sequence[int]], reserve: int = 0) -> list[list[int]]:
        """The nodes of each phrase below a node, as far as there is room beside so many nodes; later phrases first."""
        paths = []
        for phrase in reversed(phrases):
            if len(self.tokens) + len(phrase) + reserve > MAX_NODES:
                break
            paths.append(self.add_path(node, phrase))
        return paths
