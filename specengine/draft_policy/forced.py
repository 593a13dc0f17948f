"""How many of the tokens that a grammar forces are verified behind a drafted leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specengine.draft_policy.acceptance import Acceptance
from specengine.draft_policy.cost_model import Curve, CycleCosts

LEVELS = 16  # leaves this deep, and deeper, are one kind
PRIOR = tuple(0.7**depth for depth in range(LEVELS))  # that a leaf is reached: a usual drafter's accepted share a level
CYCLES = 16  # that the price remembers


@dataclass(frozen=True)
class ForcedRun:
    """Forced tokens behind a leaf.  request: its number in the batch.  depth: of the leaf.  length: in tokens."""

    request: int
    depth: int
    length: int


class ForcedPolicy:
    """Takes forced tokens while each is worth its row. A forced token is accepted wherever its leaf is.

    So a row brings as many tokens as the chance that its leaf is reached, learned by the leaf's depth. A second
    must bring as many as recent cycles did.
    """

    def __init__(self, costs: CycleCosts | None = None) -> None:
        self._costs = costs or CycleCosts()
        self._reached = Acceptance(PRIOR, weight=8, memory=100)
        self._rates: dict[int, tuple[float, float]] = {}  # recent tokens and seconds of a cycle, by batch size (bits)

    def lengths(self, runs: Sequence[ForcedRun], rooms: Sequence[int], nodes: int, prefix: float) -> list[int]:
        """Returns how many tokens of each run to verify.

        rooms: nodes that each request's tree may grow by.  nodes: of all trees, roots excluded.  prefix: mean tokens in
        the cache.
        """
        curve, left, chosen = self._costs.curve(len(rooms), prefix), [*rooms], [0] * len(runs)
        price = self._price(curve)
        chances = [self._chance(run.depth) for run in runs]
        for number in sorted(range(len(runs)), key=lambda number: -chances[number]):
            run = runs[number]
            while chosen[number] < min(run.length, left[run.request]):
                if chances[number] < price * (curve(nodes + 1) - curve(nodes)):
                    break
                chosen[number] += 1
                nodes += 1
            left[run.request] -= chosen[number]
        return chosen

    def observe(
        self,
        requests: int,
        prefix: float,
        nodes: int,
        tokens: int,
        seconds: float,
        drafting: float,
        experts: float | None = None,
    ) -> None:
        """Learns from a cycle.  nodes: as verified, roots excluded.  tokens: committed.  drafting: of its seconds.

        experts: that each layer read, in the mean; None: without counts.
        """
        curve = self._costs.curve(requests, prefix)
        usual = self._rates.get(requests.bit_length(), (requests, curve(0)))
        speed = self._costs.observe(curve, prefix, nodes, seconds - drafting, experts)
        mean = (usual[0] + (tokens - usual[0]) / CYCLES, usual[1] + (seconds / speed - usual[1]) / CYCLES)
        self._rates[requests.bit_length()] = mean

    def observe_leaf(self, depth: int, reached: bool) -> None:
        """Learns whether a cycle's path ran through a leaf with forced tokens behind it."""
        if depth:
            self._reached.observe(min(depth, LEVELS - 1), reached)

    def _chance(self, depth: int) -> float:
        return self._reached.rates()[min(depth, LEVELS - 1)] if depth else 1.0

    def _price(self, curve: Curve) -> float:
        tokens, seconds = self._rates.get(curve.requests.bit_length(), (0.0, 1.0))
        return max(curve.requests / curve(0), tokens / seconds)
