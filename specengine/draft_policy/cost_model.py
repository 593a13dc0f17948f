"""What a target pass costs by its number of rows. Only the ratios matter: they decide how many drafted rows pay."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class CostModel:
    """Gives the seconds of a pass: linear between and beyond the measured row counts, never less for more rows.

    rows: ascending from 1.  seconds: of a pass of each number of rows behind a short prefix.
    per_position: seconds added by each token of the prefix (empty: none). Raises ValueError for anything else.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_position: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        extra = self.per_position or (0.0,) * len(self.rows)
        if not self.rows or self.rows[0] != 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"rows: expected ascending numbers from 1, got {self.rows!r}")
        for name, values, least in (("seconds", self.seconds, 1e-12), ("per_position", extra, 0.0)):
            if len(values) != len(self.rows) or not all(math.isfinite(v) and v >= least for v in values):
                raise ValueError(f"{name}: expected {len(self.rows)} finite numbers from {least}, got {values!r}")

    @cached_property
    def _rows(self) -> list[int]:
        return [*self.rows, 2 * self.rows[-1]]

    @cached_property
    def _seconds(self) -> list[float]:
        return _extended(self.rows, self.seconds)

    @cached_property
    def _per_position(self) -> list[float]:
        return _extended(self.rows, self.per_position or (0.0,) * len(self.rows))

    def __call__(self, rows: int, prefix: float = 0.0) -> float:
        """Returns the seconds of a pass with `rows` rows behind `prefix` tokens."""
        right = min(max(1, bisect_left(self._rows, rows)), len(self._rows) - 1)  # the last line goes on
        low, high = (self._seconds[i] + prefix * self._per_position[i] for i in (right - 1, right))
        begin, end = self._rows[right - 1], self._rows[right]
        return low + (high - low) * (rows - begin) / (end - begin)


def _extended(rows: tuple[int, ...], values: tuple[float, ...]) -> list[float]:
    """Returns the running maximum of the values, and one more point at twice the last row count.

    A measurement that was cut short may have missed where rows begin to cost. A row beyond it therefore costs at least
    half of the mean of the measured rows.
    """
    curve = list(accumulate(values, max))
    slope = 0.5 * curve[-1] / rows[-1]
    if len(rows) > 1:
        slope = max(slope, (curve[-1] - curve[-2]) / (rows[-1] - rows[-2]))
    return [*curve, curve[-1] + slope * rows[-1]]
