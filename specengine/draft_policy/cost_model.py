"""What cycles cost where they run: learned from every cycle, in seconds of the machine's usual speed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial

# Seconds of a cycle by its rows before any is measured: SmolLM2-135M on two cores. The speed sets their scale.
ROWS = {1: 3.0e-3, 2: 3.1e-3, 4: 3.3e-3, 8: 3.6e-3, 16: 6.1e-3, 32: 11.0e-3, 1024: 350e-3}
USUAL, SPEED = 1 / 16, 1 / 8  # of a deviation: how quickly usual seconds, and the machine's speed, follow


def followed(usual: float, seconds: float, share: float = USUAL) -> float:
    """Returns usual seconds after one more measurement, which counts at most double: a machine has hiccups."""
    return usual + share * (min(seconds, 2 * usual) - usual)


def interpolated(points: Mapping[int, float], x: float) -> float:
    """Returns the value at x on the line through its neighbours among the ascending points, or the last two."""
    places = [*points]
    right = min(max(1, bisect_right(places, x)), len(places) - 1)
    low, high = places[right - 1], places[right]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)


class CycleCosts:
    """Gives the seconds of a cycle without its drafting, by its rows.

    rows: seconds before any measurement, of ascending row counts from 1, two at least.
    speed: seconds that a usual second takes now; 0: nothing was measured.
    known: what was learned, by batch size (powers of 2) and prefix (powers of 4), then by rows (powers of 2).
    """

    def __init__(self, rows: Mapping[int, float] = ROWS) -> None:
        self._prior = dict(rows)
        self.known: dict[tuple[int, int], dict[int, float]] = {}
        self.speed = 0.0

    def curve(self, requests: int, prefix: float) -> Curve:
        """Returns the seconds by nodes. prefix: tokens in the cache, the mean of the batch."""
        return Curve(requests, partial(self._point, self._nearest(*_place(requests, prefix))))

    def observe(self, curve: Curve, prefix: float, nodes: int, seconds: float) -> float:
        """Learns from a measured cycle: moves the two points beside its rows.

        Returns how much more than usual everything takes now: the machine may have become slower or faster.
        """
        rows, seconds = curve.requests + nodes, max(seconds, 1e-9)
        below, share = rows.bit_length() - 1, rows / (1 << (rows.bit_length() - 1)) - 1
        expected = curve(nodes)
        self.speed = followed(self.speed or seconds / expected, seconds / expected, SPEED)
        change = followed(expected, seconds / self.speed) / expected - 1
        place = _place(curve.requests, prefix)
        if place not in self.known:  # what is known elsewhere stays known here
            self.known[place] = dict(self._nearest(*place))
        own = self.known[place]
        for bit, weight in ((below, 1 - share), (below + 1, share)):
            if weight:
                own[bit] = curve.point(bit) * (1 + change * weight / (share**2 + (1 - share) ** 2))
        return self.speed

    def _nearest(self, size: int, length: int) -> Mapping[int, float]:
        distance = {abs(place[0] - size) + abs(place[1] - length): known for place, known in list(self.known.items())}
        return distance[min(distance)] if distance else {}

    def _point(self, known: Mapping[int, float], bit: int) -> float:
        """Returns the seconds of 2^bit rows; unknown ones are in the prior's ratio to the nearest known ones."""
        if bit in known or not known:
            return known[bit] if known else interpolated(self._prior, 1 << bit)
        by = min(known, key=lambda other: abs(other - bit))
        return known[by] / interpolated(self._prior, 1 << by) * interpolated(self._prior, 1 << bit)


class Curve:
    """The seconds of a cycle by its nodes, never less for more. point: gives those of 2^bit rows."""

    def __init__(self, requests: int, point: Callable[[int], float]) -> None:
        self.requests = requests
        self._point, self._points = point, list[float]()

    def point(self, bit: int) -> float:
        """Returns the seconds of 2^bit rows."""
        while len(self._points) <= bit:
            self._points.append(max(self._point(len(self._points)), *self._points[-1:], 0.0))
        return self._points[bit]

    def __call__(self, nodes: int) -> float:
        """Returns the seconds of a cycle with this number of nodes, roots excluded."""
        rows = self.requests + nodes
        bit = rows.bit_length() - 1
        low = self.point(bit)
        return low + (self.point(bit + 1) - low) * (rows / (1 << bit) - 1)


def _place(requests: int, prefix: float) -> tuple[int, int]:
    return requests.bit_length(), int(prefix).bit_length() // 2
