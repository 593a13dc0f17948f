"""Two drafters' trees in one: what both draft is likelier than either says, what only one of them drafts is less."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from specengine.draft_trees.scored_tree import ScoredTree, judged

# What a drafter says of a node: nothing, as it has no child of that parent; no, as it has others; or by its chance.
EDGES = (0.2, 0.5, 0.8)
_NOTHING, _NO, _FIRST = range(3)
_ANSWERS = _FIRST + len(EDGES) + 1


@dataclass(frozen=True)
class JointTree:
    """tree: all nodes of both.  surer: the better one of a node's chances.  kinds: by what both say."""

    tree: ScoredTree
    surer: list[float]
    kinds: list[int]


class Agreement:
    """Learns, by what both say of a node, how much more often it is accepted than the surer one thinks."""

    _WEIGHT, _KEEP = 10.0, 1 - 1 / 1000  # acceptances that the prior, the surer one's word, counts for; see Acceptance

    def __init__(self) -> None:
        self._accepted = [0.0] * _ANSWERS**2
        self._promised = [0.0] * _ANSWERS**2

    def joined(self, first: ScoredTree, second: ScoredTree) -> JointTree:
        """Both trees have the same root; a node of both is there once."""
        tokens, parents, said = list(first.tokens), list(first.parents), [[chance, 0.0] for chance in first.chances]
        children = {(first.parents[node], first.tokens[node]): node for node in range(1, len(tokens))}
        inner: tuple[set[int], set[int]] = set(first.parents), set()  # nodes with children in each tree
        place = [0]
        for token, parent, chance in zip(second.tokens[1:], second.parents[1:], second.chances[1:], strict=True):
            parent = place[parent]
            node = children.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
                said.append([0.0, 0.0])
            said[node][1] = chance
            inner[1].add(parent)
            place.append(node)
        surer, chances, kinds = [1.0], [1.0], [0]
        for node in range(1, len(tokens)):
            (one, other), parent = said[node], parents[node]
            kind = _answer(one, parent in inner[0]) * _ANSWERS + _answer(other, parent in inner[1])
            most = max(one, other)
            factor = (self._accepted[kind] + self._WEIGHT) / (self._promised[kind] + self._WEIGHT)
            surer.append(most)
            kinds.append(kind)
            chances.append(min(0.99, most * factor))
        return JointTree(ScoredTree(tokens, parents, chances), surer, kinds)

    def observe(self, joint: JointTree, committed: Sequence[int]) -> None:
        """Learns from what the text is: the accepted tokens and the one after them."""
        for node, accepted in judged(joint.tree, committed):
            kind = joint.kinds[node]
            self._accepted[kind] = self._accepted[kind] * self._KEEP + accepted
            self._promised[kind] = self._promised[kind] * self._KEEP + joint.surer[node]


def _answer(chance: float, spoke: bool) -> int:
    if chance > 0:
        return _FIRST + bisect_right(EDGES, chance)
    return _NO if spoke else _NOTHING
