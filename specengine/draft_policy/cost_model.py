"""What cycles and drafts cost where they run: learned from every cycle, on the low side of noisy clocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

# Seconds of a cycle by its rows before any is measured: SmolLM2-135M on two cores. A measured cycle sets their scale.
ROWS = {1: 3.0e-3, 2: 3.1e-3, 4: 3.3e-3, 8: 3.6e-3, 16: 6.1e-3, 32: 11.0e-3, 1024: 350e-3}
DOWN, UP = 1 / 4, 1 / 16  # of a deviation: other processes can only add to a time


def followed(usual: float, seconds: float) -> float:
    """Returns the usual seconds after one more measurement, which counts at most double."""
    beyond = min(seconds, 2 * usual) - usual
    return usual + beyond * (DOWN if beyond < 0 else UP)


def interpolated(points: Mapping[int, float], x: float) -> float:
    """Returns the value at x on the line through its neighbours among the ascending points, or the last two."""
    places = [*points]
    right = min(max(1, bisect_right(places, x)), len(places) - 1)
    low, high = places[right - 1], places[right]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)


class CycleCosts:
    """Gives the seconds of a cycle without its drafting, by its rows.

    rows: seconds before any measurement, by ascending row counts from 1, two at least.
    Batch sizes are told apart by powers of 2, prefixes by powers of 4.
    """

    def __init__(self, rows: Mapping[int, float] = ROWS) -> None:
        self._prior = dict(rows)
        self._known: dict[tuple[int, int], dict[int, float]] = {}  # by batch size and prefix, then by rows

    def curve(self, requests: int, nodes: int, prefix: float) -> list[float]:
        """Returns the seconds with 0 to `nodes` nodes, roots excluded, never less for more.

        prefix: tokens in the cache, the mean of the batch.
        """
        points = self._points(requests, requests + nodes, prefix)
        out: list[float] = []
        for rows in range(requests, requests + nodes + 1):
            out.append(max(points[rows] if rows in points else interpolated(points, rows), out[-1] if out else 0.0))
        return out

    def observe(self, requests: int, nodes: int, prefix: float, seconds: float) -> None:
        """Learns from a measured cycle."""
        rows = requests + nodes
        points = self._points(requests, rows, prefix)
        own = self._known.setdefault(_place(requests, prefix), {})
        expected = interpolated(points, rows)
        below = max(point for point in points if point <= rows)
        share = (rows - below) / below
        change = followed(expected, seconds) - expected
        for point, weight in ((below, 1 - share), (2 * below, share)):
            if weight and not own:  # the first one sets the scale
                own[point] = points[point] * seconds / expected
            elif weight:
                own[point] = points[point] + change * weight / (share**2 + (1 - share) ** 2)

    def _points(self, requests: int, rows: int, prefix: float) -> dict[int, float]:
        """Returns the seconds of 1, 2, 4, .. rows, past `rows`; unknown ones are in the prior's ratio to known ones."""
        place = _place(requests, prefix)
        nearest = min(self._known, key=lambda key: (abs(key[0] - place[0]), abs(key[1] - place[1])), default=None)
        known = self._known[nearest] if nearest else {}
        points: dict[int, float] = {}
        for bit in range(rows.bit_length() + 1):
            point = 1 << bit
            by = min(known, key=lambda other: abs(other.bit_length() - point.bit_length()), default=0)
            scale = known[by] / interpolated(self._prior, by) if by else 1.0
            points[point] = scale * interpolated(self._prior, point)
        return points

    @property
    def state(self) -> list[list[float]]:
        """All measurements, as plain numbers."""
        return [[*place, rows, seconds] for place, known in self._known.items() for rows, seconds in known.items()]

    @state.setter
    def state(self, state: list[list[float]]) -> None:
        for size, prefix, rows, seconds in state:
            self._known.setdefault((int(size), int(prefix)), {})[int(rows)] = float(seconds)


class DraftSeconds:
    """Learns what a source's drafts take, by their levels."""

    def __init__(self) -> None:
        self.levels: dict[int, float] = {}

    def observe(self, levels: int, seconds: float) -> float:
        """Takes one measurement; returns what a draft of so many levels usually takes."""
        self.levels[levels] = usual = followed(self.levels.get(levels, seconds), seconds)
        return usual

    @property
    def of_one_level(self) -> float:
        """The seconds of one more level."""
        first, last = min(self.levels, default=0), max(self.levels, default=0)
        if first == last:
            return self.levels[last] / last if last else 0.0
        return max(0.0, (self.levels[last] - self.levels[first]) / (last - first))


def _place(requests: int, prefix: float) -> tuple[int, int]:
    return requests.bit_length(), int(prefix).bit_length() // 2
