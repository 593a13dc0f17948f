"""A drafted tree without the nodes that a grammar forbids, and with the text that it forces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specengine.draft_trees.tree import DraftTree


class ForcedText(NamedTuple):
    """The tokens that must follow a node: its mask, and theirs, have one token each."""

    node: int
    tokens: list[int]


@dataclass(frozen=True)
class CutTree:
    """The allowed part of a tree.

    drafted: of each node, its number in the whole tree; -1 for a forced one.  forced: texts behind its leaves.
    """

    tree: DraftTree
    drafted: list[int]
    forced: list[ForcedText]

    @classmethod
    def of(cls, tree: DraftTree, kept: Sequence[int], forced: Sequence[ForcedText] = ()) -> CutTree:
        """Keeps these nodes of a tree, in their order.  forced: by nodes of the new tree."""
        if len(kept) == len(tree.tokens):
            return cls(tree, [*kept], [*forced])
        place = {node: new for new, node in enumerate(kept)}
        parents = [-1, *(place[tree.parents[node]] for node in kept[1:])]
        return cls(DraftTree([tree.tokens[node] for node in kept], parents), [*kept], [*forced])

    def grown(self, lengths: Sequence[int]) -> CutTree:
        """Returns the tree with a chain behind each leaf.  lengths: tokens of each forced text."""
        if not any(lengths):
            return self
        tokens, parents = [*self.tree.tokens], [*self.tree.parents]
        for (leaf, text), length in zip(self.forced, lengths, strict=True):
            for token in text[:length]:
                parents.append(leaf)
                leaf = len(tokens)
                tokens.append(token)
        drafted = self.drafted + [-1] * (len(tokens) - len(self.drafted))
        return CutTree(DraftTree(tokens, parents), drafted, self.forced)
