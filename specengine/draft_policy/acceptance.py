"""How often a drafted node is accepted once its parent is: by kind, by the drafter's probability."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from specengine.draft_trees.scored_tree import ScoredTree, judge_nodes

# Classes of a drafter's own probability: class i reaches from EDGES[i - 1] to EDGES[i].
EDGES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))


class Acceptance:
    """Keeps running averages of how often a node of each kind is accepted once its parent is.

    A kind is a small integer whose meaning the drafter chooses: a depth, the strength of a match.
    prior: the rate of each kind before any observation, or another Acceptance. Another Acceptance also learns every
    observation made here: a request's averages lean on the averages of all requests.
    weight: observations that the prior counts for.  memory: observations after which an old one counts a third.
    """

    def __init__(self, prior: Sequence[float] | Acceptance, weight: float, memory: float) -> None:
        self._teaches = prior if isinstance(prior, Acceptance) else None
        self._prior: Sequence[float] = prior.rates() if isinstance(prior, Acceptance) else prior
        self._weight, self._keep = weight, 1 - 1 / memory
        self._rates = list(self._prior)
        self._seen, self._accepted = [0.0] * len(self._rates), [0.0] * len(self._rates)
        self.learned = [self._seen, self._accepted, self._rates]

    def rates(self) -> list[float]:
        """Returns the probability of acceptance of each kind; not a copy.

        Of a prior that learns, each kind counts as it was at the kind's last observation here.
        """
        return self._rates

    def refresh(self) -> None:
        """Takes up what a prior that learns has learned meanwhile, of every kind."""
        counts, weight = zip(self._accepted, self._seen, self._prior, strict=True), self._weight
        self._rates[:] = [(accepted + weight * rate) / (seen + weight) for accepted, seen, rate in counts]

    def observe(self, kind: int, accepted: bool) -> None:
        """Counts one node whose parent was accepted."""
        seen = self._seen[kind] = self._seen[kind] * self._keep + 1
        taken = self._accepted[kind] = self._accepted[kind] * self._keep + accepted
        self._rates[kind] = (taken + self._weight * self._prior[kind]) / (seen + self._weight)
        if self._teaches:
            self._teaches.observe(kind, accepted)


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
