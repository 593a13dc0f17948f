"""A tree made of paths: nodes that paths share appear once."""

from __future__ import annotations

from collections.abc import Sequence

from specengine._C import MAX_NODES
from specengine.draft_trees.tree import DraftTree


class MergedPaths:
    """Grows a tree path by path. Node 0 is the root; a node's children have different tokens."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._children: dict[tuple[int, int], int] = {}

    @property
    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents)

    def child(self, node: int, token: int) -> int | None:
        """Returns a node's child with this token, or None."""
        return self._children.get((node, token))

    def add(self, node: int, token: int) -> int:
        """Returns a node's child with this token, and adds it where it is missing."""
        child = self._children.setdefault((node, token), len(self.tokens))
        if child == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(node)
        return child

    def add_path(self, node: int, tokens: Sequence[int]) -> list[int]:
        """Adds a path below a node; returns its nodes."""
        path = []
        for token in tokens:
            node = self.add(node, token)
            path.append(node)
        return path

    def add_phrases(self, node: int, phrases: Sequence[Sequence[int]], reserve: int = 0) -> list[list[int]]:
        """Adds phrases below a node, the last phrase first; returns the nodes of each.

        Phrases are left out once fewer than `reserve` nodes would remain free.
        """
        paths = []
        for phrase in reversed(phrases):
            if len(self.tokens) + len(phrase) + reserve > MAX_NODES:
                break
            paths.append(self.add_path(node, phrase))
        return paths
