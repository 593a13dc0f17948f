"""How often a drafted node is accepted once its parent is: by kind, by the drafter's probability, by two drafters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from specengine.draft_trees.join import join_trees
from specengine.draft_trees.scored_tree import ScoredTree, judge_nodes

# Classes of a drafter's own probability: class i reaches from EDGES[i - 1] to EDGES[i].
EDGES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))

# A drafter's verdict on a node: ABSENT, it has no child of that parent; OTHER, it has other children of that parent;
# or PRESENT and more, by the class of the node's chance.
ABSENT, OTHER, PRESENT = range(3)
SURE = (0.2, 0.5, 0.8)
VERDICTS = PRESENT + len(SURE) + 1


class Acceptance:
    """Keeps running averages of how often a node of each kind is accepted once its parent is.

    A kind is a small integer whose meaning the drafter chooses: a depth, the strength of a match.
    prior: the rate of each kind before any observation, or another Acceptance. Another Acceptance also learns every
    observation made here: a request's averages lean on the averages of all requests.
    weight: observations that the prior counts for.  memory: observations after which an old one counts a third.
    """

    def __init__(self, prior: Sequence[float] | Acceptance, weight: float, memory: float) -> None:
        self.prior, self.weight = prior, weight
        self._keep = 1 - 1 / memory
        self._rates = list(prior.rates() if isinstance(prior, Acceptance) else prior)
        self._seen = [0.0] * len(self._rates)
        self._accepted = [0.0] * len(self._rates)
        self.learned = [self._seen, self._accepted, self._rates]

    def rates(self) -> list[float]:
        """Returns the probability of acceptance of each kind; not a copy.

        Of a prior that learns, each kind counts as it was at the kind's last observation here.
        """
        return self._rates

    def refresh(self) -> None:
        """Takes up what a prior that learns has learned meanwhile, of every kind."""
        prior = self.prior.rates() if isinstance(self.prior, Acceptance) else self.prior
        counts = zip(self._accepted, self._seen, prior, strict=True)
        self._rates[:] = [(accepted + self.weight * rate) / (seen + self.weight) for accepted, seen, rate in counts]

    def observe(self, kind: int, accepted: float, expected: float = 1.0) -> None:
        """Counts one node whose parent was accepted. expected: acceptances that the prior promised."""
        prior: Sequence[float] = self.prior.rates() if isinstance(self.prior, Acceptance) else self.prior
        seen = self._seen[kind] = self._seen[kind] * self._keep + expected
        taken = self._accepted[kind] = self._accepted[kind] * self._keep + accepted
        self._rates[kind] = (taken + self.weight * prior[kind]) / (seen + self.weight)
        if isinstance(self.prior, Acceptance):
            self.prior.observe(kind, accepted)


class Calibration:
    """Learns how often nodes of each drafted probability are accepted: drafters are too sure of themselves or shy."""

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


class Agreement:
    """Learns, by both drafters' verdicts, how much more often a node is accepted than the surer drafter says."""

    def __init__(self) -> None:
        self._factors = Acceptance([1.0] * VERDICTS**2, weight=10, memory=1000)
        self.learned = self._factors.learned

    def join(self, first: ScoredTree, second: ScoredTree) -> tuple[ScoredTree, list[tuple[int, float]]]:
        """Joins two trees with the same root; returns each node's verdicts and surer chance too, for observe()."""
        joined, factors = join_trees(first, second), self._factors.rates()
        verdicts = [(0, 1.0)]
        for parent, own in zip(joined.parents[1:], joined.chances[1:], strict=True):
            one, other = (_verdict(chance, parent in inner) for chance, inner in zip(own, joined.inner, strict=True))
            verdicts.append((one * VERDICTS + other, max(own)))
        chances = [min(0.99, surer * factors[kind]) for kind, surer in verdicts]
        return ScoredTree(joined.tokens, joined.parents, chances), verdicts

    def observe(self, tree: ScoredTree, verdicts: Sequence[tuple[int, float]], committed: Sequence[int]) -> None:
        """Learns from the committed tokens: the accepted ones and the bonus token."""
        for node, accepted in judge_nodes(tree, committed):
            self._factors.observe(verdicts[node][0], accepted, verdicts[node][1])


def _verdict(chance: float, has_children: bool) -> int:
    return PRESENT + bisect_right(SURE, chance) if chance > 0 else OTHER if has_children else ABSENT
