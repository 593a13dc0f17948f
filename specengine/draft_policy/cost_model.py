"""What cycles cost where they run: learned from every cycle, in seconds of the machine's usual speed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise

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

    rows: seconds before any measurement, by ascending row counts from 1, two at least.
    speed: seconds that a usual second takes now; 0: nothing was measured.
    known: what was learned, by batch size (powers of 2) and prefix (powers of 4), then by rows (powers of 2).
    """

    def __init__(self, rows: Mapping[int, float] = ROWS) -> None:
        self._prior = dict(rows)
        self.known: dict[tuple[int, int], dict[int, float]] = {}
        self.speed = 0.0

    def curve(self, requests: int, nodes: int, prefix: float) -> list[float]:
        """Returns the seconds with 0 to `nodes` nodes, roots excluded, never less for more.

        prefix: tokens in the cache, the mean of the batch.
        """
        most, out = 0.0, []
        for (a, low), (b, high) in pairwise(self._points(requests, requests + nodes, prefix).items()):
            for rows in range(max(a, requests), min(b, requests + nodes + 1)):
                most = max(most, low + (high - low) * (rows - a) / (b - a))
                out.append(most)
        return out

    def observe(self, requests: int, nodes: int, prefix: float, seconds: float) -> float:
        """Learns from a measured cycle: moves the two points beside its rows.

        Returns how much more than usual everything takes now: the machine may have become slower or faster.
        """
        rows = requests + nodes
        points, own = self._points(requests, rows, prefix), self.known.setdefault(_place(requests, prefix), {})
        expected = interpolated(points, rows)
        self.speed = followed(self.speed or seconds / expected, seconds / expected, SPEED)
        change = followed(expected, seconds / self.speed) / expected - 1
        below = 1 << (rows.bit_length() - 1)
        share = (rows - below) / below
        for point, weight in ((below, 1 - share), (2 * below, share)):
            if weight:
                own[point] = points[point] * (1 + change * weight / (share**2 + (1 - share) ** 2))
        return self.speed

    def _points(self, requests: int, rows: int, prefix: float) -> dict[int, float]:
        """Returns the seconds of 1, 2, 4, .. rows, past `rows`; unknown ones are in the prior's ratio to known ones."""
        size, length = _place(requests, prefix)
        nearest = min(self.known, key=lambda key: abs(key[0] - size) + abs(key[1] - length), default=None)
        known = self.known[nearest] if nearest else {}
        points: dict[int, float] = {}
        for bit in range(rows.bit_length() + 1):
            point = 1 << bit
            by = min(known, key=lambda other: abs(other.bit_length() - bit - 1), default=0)
            scale = known[by] / interpolated(self._prior, by) if by else 1.0
            points[point] = scale * interpolated(self._prior, point)
        return points


def _place(requests: int, prefix: float) -> tuple[int, int]:
    return requests.bit_length(), int(prefix).bit_length() // 2
