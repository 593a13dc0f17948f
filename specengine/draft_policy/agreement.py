"""Two drafters' trees in one: a node of both is likelier than either says, a node of one is less likely."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from specengine.draft_trees.scored_tree import ScoredTree, judge_nodes

# A drafter's verdict on a node: ABSENT, it has no child of that parent; OTHER, it has other children of that parent;
# or PRESENT and more, by the class of the node's chance.
EDGES = (0.2, 0.5, 0.8)
_ABSENT, _OTHER, _PRESENT = range(3)
_VERDICTS = _PRESENT + len(EDGES) + 1


@dataclass(frozen=True)
class JointTree:
    """tree: the nodes of both trees.  surer: the higher of a node's two chances.  kinds: both verdicts as a number."""

    tree: ScoredTree
    surer: list[float]
    kinds: list[int]


class Agreement:
    """Learns, by both drafters' verdicts, how much more often a node is accepted than the surer drafter says."""

    _WEIGHT, _KEEP = 10.0, 1 - 1 / 1000  # acceptances that the prior, the surer chance, counts for; see Acceptance

    def __init__(self) -> None:
        self._accepted = [0.0] * _VERDICTS**2
        self._promised = [0.0] * _VERDICTS**2

    def join(self, first: ScoredTree, second: ScoredTree) -> JointTree:
        """Joins two trees with the same root; a node of both appears once."""
        tokens = list(first.tokens)
        parents = list(first.parents)
        own = [[chance, 0.0] for chance in first.chances]  # of each node, both drafters' chances
        children = {(first.parents[node], first.tokens[node]): node for node in range(1, len(tokens))}
        inner: tuple[set[int], set[int]] = set(first.parents), set()  # nodes with children in each tree
        place = [0]
        for token, parent, chance in zip(second.tokens[1:], second.parents[1:], second.chances[1:], strict=True):
            parent = place[parent]
            node = children.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
                own.append([0.0, 0.0])
            own[node][1] = chance
            inner[1].add(parent)
            place.append(node)
        surer, chances, kinds = [1.0], [1.0], [0]
        for node in range(1, len(tokens)):
            one, other = own[node]
            parent = parents[node]
            kind = _verdict(one, parent in inner[0]) * _VERDICTS + _verdict(other, parent in inner[1])
            most = max(one, other)
            factor = (self._accepted[kind] + self._WEIGHT) / (self._promised[kind] + self._WEIGHT)
            surer.append(most)
            kinds.append(kind)
            chances.append(min(0.99, most * factor))
        return JointTree(ScoredTree(tokens, parents, chances), surer, kinds)

    def observe(self, joint: JointTree, committed: Sequence[int]) -> None:
        """Learns from the committed tokens: the accepted ones and the bonus token."""
        for node, accepted in judge_nodes(joint.tree, committed):
            kind = joint.kinds[node]
            self._accepted[kind] = self._accepted[kind] * self._KEEP + accepted
            self._promised[kind] = self._promised[kind] * self._KEEP + joint.surer[node]


def _verdict(chance: float, has_children: bool) -> int:
    if chance > 0:
        return _PRESENT + bisect_right(EDGES, chance)
    return _OTHER if has_children else _ABSENT
