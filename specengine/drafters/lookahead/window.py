"""The window of lookahead decoding (Fu et al. 2024, section 3): guesses at the tokens to come, which every pass makes
better, and whose history is read as n-grams.

The first level is a chain of guesses behind the root. Every further level has one token per column: what a pass said
behind the level before it, in the column of the same number. So the window is a tree: token i of a further level is the
child of token i of the level before, which for the second level is the i-th of root and chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from specengine.draft_trees.merge import MergedPaths

_SEED = 10  # the published code's


class JacobiWindow:
    """columns: n-grams that a pass brings, once all n - 1 levels are there; the first n - 2 passes make them.

    text: what the first guesses are drawn from.  levels: tokens; the first level has one less than there are columns,
    as the root stands in its first.
    """

    def __init__(self, columns: int, n: int, text: Sequence[int]) -> None:
        self._most = n - 1
        draw = Random(_SEED)
        self.levels = [[draw.choice(text) for _ in range(columns + n - 3)]]

    @staticmethod
    def most_nodes(columns: int, n: int) -> int:
        """Of the largest window on its way."""
        return max((columns + n - 1 - levels) * levels - 1 for levels in range(1, n))

    @property
    def depth(self) -> int:
        """Of its deepest token below the root."""
        return len(self.levels[0]) + len(self.levels) - 1

    def add_to(self, tree: MergedPaths, root: int) -> list[int]:
        """The nodes behind which the next level's tokens come, one per column."""
        column = [root, *tree.add_path(root, self.levels[0])]
        for level in self.levels[1:]:
            column = [tree.add(node, token) for node, token in zip(column, level, strict=True)]
        return column

    def advance(self, root: int, following: list[int]) -> list[tuple[int, list[int]]]:
        """Moves on by one token; gives the n-grams seen, as a token and what followed it.

        following: what the pass says behind the nodes of add_to, whose root was this token.
        """
        if len(self.levels) < self._most:
            self.levels = [*(level[1:] for level in self.levels), following[1:]]
            return []
        rest = [*self.levels[1:], following]
        found = [(key, [level[i] for level in rest]) for i, key in enumerate([root, *self.levels[0]])]
        self.levels = [rest[0][1:], *rest[1:]]
        return found
