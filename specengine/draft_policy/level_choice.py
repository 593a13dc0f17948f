"""Whether a drafter that drafts level by level should draft one more level."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.draft_policy.cost_model import CostModel

UNLIKELY = 0.02  # a node that is reached less often does not pay for the rows of its children


def next_level_pays(
    reach: Sequence[float], expected: Sequence[float], levels: int, cycle_seconds: float, level_seconds: float
) -> bool:
    """Returns whether one more level lowers the expected time per token, the mean over the requests.

    reach: per request, the probability that all its `levels` levels are accepted. The next level is assumed to be as
    likely as these were on average.  expected: tokens of the cycle without that level.
    level_seconds: what drafting one more level takes.
    """
    further = [chance ** ((levels + 1) / levels) for chance in reach]
    now = sum(1 / tokens for tokens in expected)
    then = sum(1 / (tokens + chance) for tokens, chance in zip(expected, further, strict=True))
    return then * (cycle_seconds + level_seconds) < now * cycle_seconds


class LevelChoice:
    """Measures what drafting a level takes, by its rows, and decides whether the next level pays.

    costs: of a target pass; None: every level pays.
    """

    def __init__(self, costs: CostModel | None) -> None:
        self.costs = costs
        self._seconds: dict[int, float] = {}

    def record(self, rows: int, seconds: float) -> None:
        """Records the seconds that a level of this many rows took.

        The least recent time counts: a level that was slow by chance must not keep others from being drafted.
        """
        self._seconds[rows] = min(seconds, 1.02 * self._seconds.get(rows, seconds))

    def least_gain(self, batch: int) -> float:
        """Returns the smallest share by which a level must lengthen a run to pay, for one row a request."""
        return 0.0 if self.costs is None else self._seconds.get(batch, 0.0) / self.costs(batch)

    def width_that_pays(self, chances: Sequence[Sequence[float]], depth: int) -> int:
        """Returns how many nodes of the next beam may save more time than they take; 0: drafting stops here.

        chances: per request, the probability that each node of the beam is reached, falling.
        depth: tokens on a path to a node of the beam, root included.
        """
        costs = self.costs
        assert costs is not None  # without costs there is nothing to choose by
        batch = len(chances)
        # The more tokens a cycle commits, the less another token shortens a token's share of it. Above a node lie
        # `depth` tokens, root included, and each of them is reached at least as often as the node.
        row = costs(2 * batch) / costs(batch) - 1  # what one more node in every request takes
        least = max(UNLIKELY, row)
        width = max(1, *(sum(chance >= least * (1 + depth * chance) for chance in own) for own in chances))
        reached = [min(1.0, sum(own[:width])) for own in chances]  # at most one of the nodes is accepted
        expected = [1 + depth * chance for chance in reached]
        seconds = self._seconds.get(batch * width, 0.0)
        return width if next_level_pays(reached, expected, depth, costs(batch), seconds) else 0
