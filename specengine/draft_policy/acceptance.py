"""How often drafted nodes are accepted, by kind of node."""

from __future__ import annotations

from collections.abc import Sequence


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
