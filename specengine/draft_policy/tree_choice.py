"""How large a tree pays: the probability that a node is accepted against what its row costs.

Whatever is learned here changes the speed only: under the rule `match` every tree gives the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

from specengine.draft_policy.cost_model import CostModel

CYCLE_SECONDS = 2e-4  # of a cycle beside its pass: host, sampling
DRAFT_SECONDS = 2e-4  # more where anything is drafted: its rows in every stage. Generous, so that doubt drafts nothing


def cycle_seconds(costs: CostModel, requests: int, nodes: int, prefix: float) -> float:
    """Of a cycle without its drafting. nodes: of all requests, beside the roots.  prefix: see choose_nodes."""
    return costs(requests + nodes, prefix) + CYCLE_SECONDS + (DRAFT_SECONDS if nodes else 0)


class Acceptance:
    """Running averages of how often a node of each kind is accepted once its parent is.

    A kind is a small integer that a drafter gives a meaning: a depth, the strength of a match.
    prior: what is believed before anything is seen: one rate per kind, or another Acceptance, which then learns
    whatever this one sees (a request's averages lean on those of all requests).
    weight: observations the prior counts for.  memory: observations after which an old one counts a third.
    """

    def __init__(self, prior: Sequence[float] | Acceptance, weight: float, memory: float) -> None:
        self.prior, self.weight = prior, weight
        self._keep = 1 - 1 / memory
        kinds = prior.kinds if isinstance(prior, Acceptance) else len(prior)
        self._seen = [0.0] * kinds
        self._accepted = [0.0] * kinds

    @property
    def kinds(self) -> int:
        return len(self._seen)

    def rates(self) -> list[float]:
        """The probability of acceptance of each kind."""
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


def choose_nodes(probabilities: Sequence[Sequence[float]], costs: CostModel, prefix: float = 0.0) -> list[int]:
    """How many nodes beside its root each request of a batch should draft: the least expected time per token.

    probabilities: per request, that the target's text runs through each candidate node, falling, so that any
    number of first ones is a tree. prefix: tokens in the cache, the mean of the batch.

    The rows of all requests are one pass, so they compete. What is made small is the mean over the requests, not the
    time per token of all of them together: that would let one that copies take rows for which all the others wait.
    """
    requests = len(probabilities)
    gains: list[tuple[float, int]] = []  # of cycles per token, by each node, and whose it is
    for owner, nodes in enumerate(probabilities):
        expected = 1.0
        for probability in nodes:
            gains.append((1 / expected - 1 / (expected + probability), owner))
            expected += probability
    gains.sort(key=lambda gain: -gain[0])  # equal ones stay in drafting order
    cycles, taken = float(requests), 0
    least = cycles * cycle_seconds(costs, requests, 0, prefix)
    for count, (gain, _) in enumerate(gains, start=1):
        cycles -= gain
        time = cycles * cycle_seconds(costs, requests, count, prefix)
        if time < least:  # the fewest of equals
            least, taken = time, count
    chosen = [0] * requests
    for _, owner in gains[:taken]:
        chosen[owner] += 1
    return chosen


def deeper_pays(
    reach: Sequence[float], expected: Sequence[float], levels: int, cycle_seconds: float, level_seconds: float
) -> bool:
    """Whether one more level of drafts makes the expected time per token less, the mean over the requests.

    reach: per request, that all its `levels` levels are accepted; the next one is thought to be as likely as they were
    on average.  expected: tokens of the cycle as it is.  level_seconds: what drafting one more takes.
    """
    further = [chance ** ((levels + 1) / levels) for chance in reach]
    now = sum(1 / tokens for tokens in expected)
    then = sum(1 / (tokens + chance) for tokens, chance in zip(expected, further, strict=True))
    return then * (cycle_seconds + level_seconds) < now * cycle_seconds


class WidthChoice:
    """Picks among a few fixed widths of trees by what they take and how deep they were accepted of late.

    A wider tree is accepted deeper, and by how much depends on the drafter: each width has rates of its own, which lean
    on those of all.  nodes: of the widest, root included.
    """

    PRIOR = 0.5  # chance of a drafted token before anything is seen
    PROBE = 32  # every so many cycles of the root alone one drafts, or nothing would ever be learned again

    def __init__(self, nodes: int) -> None:
        self._all = Acceptance([self.PRIOR] * (nodes - 1), weight=4, memory=100)
        self._widths: dict[int, Acceptance] = {}
        self._undrafted = 0

    def _acceptance(self, width: int) -> Acceptance:
        return self._widths.setdefault(width, Acceptance(self._all, weight=8, memory=100))

    def choose(self, widths: Sequence[int], seconds: Sequence[float]) -> int:
        """The width with the least expected time per token; widths ascend, seconds are those of a cycle."""
        best, least = widths[0], float("inf")
        for width, time in zip(widths, seconds, strict=True):
            expected = reach = 1.0
            for rate in self._acceptance(width).rates()[: width - 1]:
                reach *= rate
                expected += reach
            if time / expected < least:  # the narrowest of equals
                best, least = width, time / expected
        self._undrafted = self._undrafted + 1 if best == 1 else 0
        probe = self._undrafted and self._undrafted % self.PROBE == 0
        return widths[min(1, len(widths) - 1)] if probe else best

    def observe(self, width: int, drafted: int, accepted: int) -> None:
        """Learns from a cycle of this width; where the drafter found nothing, the first token counts as refused."""
        for depth in range(min(accepted + 1, max(drafted, 1), width - 1)):
            self._acceptance(width).observe(depth, depth < accepted)
