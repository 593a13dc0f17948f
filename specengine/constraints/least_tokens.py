"""The constraint of a request without a grammar whose text has a least length."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from specengine.constraints.cut_tree import CutTree
from specengine.draft_trees.token_masks import mask_of
from specengine.draft_trees.tree import DraftTree


class LeastTokens:
    """Allows every token but those that end the text, until it has `least` tokens; then it allows all."""

    def __init__(self, least: int, ends: Collection[int], vocab_size: int) -> None:
        self._least, self._ends, self._vocab_size = least, frozenset(ends), vocab_size
        self._missing = least
        self._row = ~mask_of(self._ends, vocab_size)

    def fresh(self) -> LeastTokens:
        """See Constraint."""
        return LeastTokens(self._least, self._ends, self._vocab_size)

    def cut(self, tree: DraftTree, whole: bool = False) -> CutTree:
        """See Constraint; nothing is forced."""
        depths = _depths(tree)
        kept = [0]
        allowed = {0}
        for node, parent in enumerate(tree.parents):
            early_end = depths[node] <= self._missing and tree.tokens[node] in self._ends
            if node and parent in allowed and not early_end:
                allowed.add(node)
                kept.append(node)
        return CutTree.of(tree, [*range(len(tree.tokens))] if whole else kept)

    def fill(self, tree: DraftTree, rows: np.ndarray) -> None:
        """See Constraint."""
        for row, depth in zip(rows, _depths(tree), strict=True):
            row[:] = self._row if depth < self._missing else -1

    def advance(self, tokens: Sequence[int]) -> None:
        """See Constraint."""
        self._missing -= len(tokens)


def _depths(tree: DraftTree) -> list[int]:
    depths = [0] * len(tree.parents)
    for node, parent in enumerate(tree.parents[1:], start=1):
        depths[node] = depths[parent] + 1
    return depths
