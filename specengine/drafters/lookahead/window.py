"""The window of lookahead decoding (Fu et al. 2024, section 3): guesses at the tokens to come, better with every pass.

The history of the guesses is read as n-grams. The first level is a chain of guesses behind the root. Every further
level has one token per column: the likeliest token behind the level before it, in the column of the same number. The
window is therefore a tree: token i of a further level is the child of token i of the level before. For the second level
that is the i-th node of root and chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from specengine.draft_trees.merge import MergedPaths

_SEED = 10  # of the published code


class JacobiWindow:
    """Holds the guesses of one request.

    columns: n-grams that a pass finds, once all n - 1 levels exist; the first n - 2 passes make the levels.
    text: the first guesses are drawn from it.  levels: tokens. The first level has one token less than there are
    columns, as the root stands in its first column.
    """

    def __init__(self, columns: int, n: int, text: Sequence[int]) -> None:
        self._most = n - 1
        draw = Random(_SEED)
        self.levels = [[draw.choice(text) for _ in range(columns + n - 3)]]

    @staticmethod
    def most_nodes(columns: int, n: int) -> int:
        """Returns the nodes of the largest window, root excluded, while its levels are made too."""
        return max((columns + n - 1 - levels) * levels - 1 for levels in range(1, n))

    @property
    def depth(self) -> int:
        """Depth of its deepest token below the root."""
        return len(self.levels[0]) + len(self.levels) - 1

    def add_to(self, tree: MergedPaths, root: int) -> list[int]:
        """Adds the window below a root; returns the nodes that the next level goes on from, one per column."""
        column = [root, *tree.add_path(root, self.levels[0])]
        for level in self.levels[1:]:
            column = [tree.add(node, token) for node, token in zip(column, level, strict=True)]
        return column

    def advance(self, root: int, following: list[int]) -> list[tuple[int, list[int]]]:
        """Moves on by one token; returns the n-grams found, each as a token and the tokens behind it.

        root: the token of the root of add_to.  following: the likeliest tokens behind the nodes that add_to returned.
        """
        if len(self.levels) < self._most:
            self.levels = [*(level[1:] for level in self.levels), following[1:]]
            return []
        rest = [*self.levels[1:], following]
        found = [(key, [level[i] for level in rest]) for i, key in enumerate([root, *self.levels[0]])]
        self.levels = [rest[0][1:], *rest[1:]]
        return found
