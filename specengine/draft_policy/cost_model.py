"""What cycles cost where they run: learned from every cycle, in seconds of the machine's usual speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from specengine.draft_policy.expert_reads import ExpertReads

# Seconds of a cycle by its rows before any is measured: SmolLM2-135M on two cores. The speed sets their scale.
ROWS = {1: 3.0e-3, 2: 3.1e-3, 4: 3.3e-3, 8: 3.6e-3, 16: 6.1e-3, 32: 11.0e-3, 1024: 350e-3}
# The same on a GPU: a model of 8 billion bfloat16 numbers on one H200, as modelled.
DEVICE_ROWS = {1: 4.47e-3, 8: 4.58e-3, 64: 4.87e-3, 128: 5.18e-3, 512: 19.5e-3}
BITS = 14  # points of a curve; beyond them it goes on as between the last two
_BITS = np.arange(BITS)
_ROWS = np.arange(1, 129)  # where a mixture's seconds bend: 128 rows read nearly all experts
AHEAD = (1, 2, 4, 8)  # levels of a mixture of experts; with the first alone a sure drafter loses 6 % in the replay
USUAL, SPEED = 1 / 16, 1 / 8  # of a deviation: how quickly usual seconds, and the machine's speed, follow


def followed(usual: float, seconds: float, share: float = USUAL) -> float:
    """Returns usual seconds after one more measurement, which counts at most double: a machine has hiccups."""
    return usual + share * (min(seconds, 2 * usual) - usual)


class CycleCosts:
    """Gives the seconds of a cycle without its drafting, by its rows.

    rows: seconds before any measurement, of ascending row counts from 1, two at least; what more rows read of experts
    is added.
    experts: what a mixture of experts reads; None: a dense model.
    speed: seconds that a usual second takes now; 0: nothing was measured.
    known: what was learned, by batch size (powers of 2) and prefix (powers of 4), then by rows (powers of 2).
    """

    def __init__(self, rows: Mapping[int, float] = ROWS, experts: ExpertReads | None = None) -> None:
        places, seconds = [*rows, 1 << BITS], [*rows.values()]
        row = (seconds[-1] - seconds[-2]) / (places[-2] - places[-3])  # as between the last two, so beyond them
        seconds.append(seconds[-1] + row * (places[-1] - places[-2]))
        self._dense = np.maximum.accumulate(np.interp(1 << _BITS, places, seconds))
        self.experts = experts
        self.known: dict[tuple[int, int], dict[int, float]] = {}
        self.speed = 0.0

    def curve(self, requests: int, prefix: float) -> Curve:
        """Returns the seconds by nodes. prefix: tokens in the cache, the mean of the batch.

        Points that no cycle measured have the prior's shape between and beyond those that were.
        """
        known, prior = sorted(self._nearest(_place(requests, prefix)).items()), self._prior()
        bits = [bit for bit, _ in known] or [0]
        ratios = np.interp(_BITS, bits, [seconds for _, seconds in known] / prior[bits] if known else [1.0])
        points = np.maximum.accumulate(ratios * prior)
        if not self.experts:
            return Curve(requests, points.tolist())
        added, place = self.experts.added, np.log2(_ROWS)
        bends = self._dense[0] * (added(_ROWS) - np.interp(_ROWS, 1 << _BITS, added(1 << _BITS)))
        room = points[np.ceil(place).astype(int)] - np.interp(_ROWS, 1 << _BITS, points)  # up to the next point
        return Curve(requests, points.tolist(), np.minimum(bends * np.interp(place, _BITS, ratios), room).tolist())

    def observe(self, curve: Curve, prefix: float, nodes: int, seconds: float, experts: float | None = None) -> float:
        """Learns from a measured cycle: moves the two points beside its rows.

        experts: that each layer read, in the mean; None: without counts.
        Returns how much more than usual everything takes now: the machine may have become slower or faster.
        """
        rows, expected = min(curve.requests + nodes, 1 << (BITS - 1)), curve(nodes)
        if self.experts and experts:
            self.experts.observe(rows, experts)
            self.experts.record(rows, experts, expected * self.speed or seconds, seconds)
        ratio = max(seconds, 1e-9) / expected
        # No cycle is twice as fast as usual, but the first one of a process may be many times slower.
        self.speed = followed(min(self.speed or ratio, 2 * ratio), ratio, SPEED)
        change = followed(1.0, ratio / self.speed) - 1
        place = _place(curve.requests, prefix)
        if place not in self.known:  # what is known elsewhere stays known here
            self.known[place] = dict(self._nearest(place))
        below = rows.bit_length() - 1
        share = rows / (1 << below) - 1
        for bit, weight in ((below, 1 - share), (below + 1, share)):
            if weight:
                self.known[place][bit] = curve.points[bit] * (1 + change * weight / (share**2 + (1 - share) ** 2))
        return self.speed

    def _prior(self) -> npt.NDArray[np.float64]:
        dense = self._dense
        return dense if self.experts is None else dense + dense[0] * self.experts.added(1 << _BITS)

    def _nearest(self, place: tuple[int, int]) -> Mapping[int, float]:
        def distance(other: tuple[int, int]) -> int:
            return abs(other[0] - place[0]) + abs(other[1] - place[1])

        return self.known.get(place) or self.known.get(min(list(self.known), key=distance, default=place), {})


class Curve:
    """The seconds of a cycle by its nodes.

    points: those of 1, 2, 4, .. rows, never less for more.
    bends: of a mixture of experts, by rows from 1: seconds above the line through the points beside, at most up to the
    next one.
    """

    def __init__(self, requests: int, points: Sequence[float], bends: Sequence[float] = ()) -> None:
        self.requests, self.points, self._bends = requests, points, bends

    @property
    def mixture(self) -> bool:
        """Whether rows share experts, so that further rows become cheaper."""
        return bool(self._bends)

    def __call__(self, nodes: int) -> float:
        """Returns the seconds of a cycle with this number of nodes, roots excluded."""
        rows = self.requests + nodes
        bit = min(rows.bit_length(), BITS - 1) - 1
        low = self.points[bit]
        bend = self._bends[rows - 1] if rows <= len(self._bends) else 0.0
        return low + (self.points[bit + 1] - low) * (rows / (1 << bit) - 1) + bend

    def level(self, nodes: int, width: int) -> float:
        """Returns the seconds of a level of `width` nodes behind others: the least of those that may follow.

        Rows that share experts become cheaper. A level that does not pay alone may pay together with the next ones.
        """
        ahead = AHEAD if self.mixture else (1,)
        return min(self(nodes + count * width) - self(nodes + (count - 1) * width) for count in ahead)


UNKNOWN = Curve(1, [1.0] * BITS)


def _place(requests: int, prefix: float) -> tuple[int, int]:
    return requests.bit_length(), int(prefix).bit_length() // 2
