"""What a drafter's own probabilities mean: drafters are surer of themselves than they should be, or less sure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from specengine.draft_policy.acceptance import Acceptance
from specengine.draft_policy.acceptance_watch import AcceptanceWatch
from specengine.draft_trees.scored_tree import ScoredTree, judge_nodes

# Acceptance is learned by classes of the drafter's own probability. Class i reaches from EDGES[i - 1] to EDGES[i].
EDGES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))


class Calibration:
    """Learns how often nodes of each drafted probability are accepted.

    drafter: its name, for a warning.
    """

    def __init__(self, drafter: str = "the drafter") -> None:
        self._acceptance = Acceptance(MIDDLES, weight=20, memory=1000)
        self._watch = AcceptanceWatch(drafter)

    def __call__(self, chances: Sequence[float]) -> list[float]:
        """Returns how often nodes with these chances are accepted once their parent is."""
        rates = self._acceptance.rates()
        return [rates[bisect_right(EDGES, chance)] for chance in chances]

    def observe(self, tree: ScoredTree, committed: Sequence[int]) -> None:
        """Learns from the committed tokens: the accepted ones and the bonus token.

        tree: with the drafter's own chances, before it was cut. Nodes that were never verified count too. Otherwise a
        kind of node that once did not pay could never be found to pay later.
        """
        taken = False
        for node, accepted in judge_nodes(tree, committed):
            self._acceptance.observe(bisect_right(EDGES, tree.chances[node]), accepted)
            taken |= accepted
        if len(tree.tokens) > 1 and committed:
            self._watch.observe(taken)
