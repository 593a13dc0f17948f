"""How often a drafted node is accepted once its parent is: by kind of node, by drafted probability, by two drafters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from specengine.draft_trees.scored_tree import ScoredTree, judge_nodes

# Classes of a drafter's own probability: class i reaches from EDGES[i - 1] to EDGES[i].
EDGES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))

# A drafter's verdict on a node: ABSENT, it has no child of that parent; OTHER, it has other children of that parent;
# or PRESENT and more, by the class of the node's chance.
_ABSENT, _OTHER, _PRESENT = range(3)
_SURE = (0.2, 0.5, 0.8)
_VERDICTS = _PRESENT + len(_SURE) + 1


class Acceptance:
    """Keeps running averages of how often a node of each kind is accepted once its parent is.

    A kind is a small integer whose meaning the drafter chooses: a depth, the strength of a match.
    prior: the rate of each kind before any observation, or another Acceptance. Another Acceptance also learns every
    observation made here: a request's averages lean on the averages of all requests.
    weight: observations that the prior counts for.  memory: observations after which an old one counts a third.
    """

    def __init__(self, prior: Sequence[float] | Acceptance, weight: float, memory: float) -> None:
        self.prior = prior
        self.weight = weight
        self._keep = 1 - 1 / memory
        kinds = prior.kinds if isinstance(prior, Acceptance) else len(prior)
        self._seen = [0.0] * kinds
        self._accepted = [0.0] * kinds
        self.learned = [self._seen, self._accepted]

    @property
    def kinds(self) -> int:
        """Number of kinds."""
        return len(self._seen)

    def rates(self) -> list[float]:
        """Returns the probability of acceptance of each kind."""
        prior = self.prior.rates() if isinstance(self.prior, Acceptance) else self.prior
        weight = self.weight
        counts = zip(self._accepted, self._seen, prior, strict=True)
        return [(accepted + weight * rate) / (seen + weight) for accepted, seen, rate in counts]

    def observe(self, kind: int, accepted: bool) -> None:
        """Counts one node whose parent was accepted."""
        self._seen[kind] = self._seen[kind] * self._keep + 1
        self._accepted[kind] = self._accepted[kind] * self._keep + accepted
        if isinstance(self.prior, Acceptance):
            self.prior.observe(kind, accepted)


class Calibration:
    """Learns how often nodes of each drafted probability are accepted: drafters are too sure of themselves or unsure."""

    def __init__(self) -> None:
        self._acceptance = Acceptance(MIDDLES, weight=20, memory=1000)
        self.learned = self._acceptance.learned

    def __call__(self, chances: Sequence[float]) -> list[float]:
        """Returns how often nodes with these chances are accepted once their parent is."""
        rates = self._acceptance.rates()
        return [rates[bisect_right(EDGES, chance)] for chance in chances]

    def observe(self, tree: ScoredTree, committed: Sequence[int]) -> bool:
        """Learns from a tree with the drafter's own chances; returns whether any node was right.

        committed: the accepted tokens and the bonus token. Nodes that were cut off count too. Otherwise a kind of node
        that once did not pay never could again.
        """
        right = False
        for node, accepted in judge_nodes(tree, committed):
            self._acceptance.observe(bisect_right(EDGES, tree.chances[node]), accepted)
            right |= accepted
        return right


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
        self.learned = [self._accepted, self._promised]

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
        return _PRESENT + bisect_right(_SURE, chance)
    return _OTHER if has_children else _ABSENT
