"""How many experts of a mixture a pass reads by its rows, learned from the counts of passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log

import numpy as np
import numpy.typing as npt

# Of the chains of Laguna (256 experts, 8 of them a token) and GLM-4.7-Flash (64, 4): 0.74 to 0.80.
EXPONENT = 0.77
KEEP = 1 - 1 / 64  # what a count is worth after one more: the exponent remembers about 64 passes


@dataclass
class PassSums:
    """Sums over the cycles of one number of rows.

    experts: means of layers.  predicted, measured: seconds without drafting.
    """

    passes: int = 0
    experts: float = 0.0
    predicted: float = 0.0
    measured: float = 0.0


@dataclass
class ExpertReads:
    """The law of one target and drafter: a layer reads min(E, k n^a) experts for n rows.

    experts, per_token: E and k.  share: of the bytes that a pass of one row reads, those of experts.  exponent: a; rows
    that take the same experts have less, and independent ones 1.  weight: what a counts for; at first, one pass of two
    rows.  passes: by rows.
    """

    experts: int
    per_token: int
    share: float
    exponent: float = EXPONENT
    weight: float = log(2) ** 2
    passes: dict[int, PassSums] = field(default_factory=dict)

    def added(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Returns the bytes that passes read beyond those of one row, in passes of one row."""
        times = np.minimum(rows**self.exponent, self.experts / self.per_token)
        return self.share * (times - 1)

    def observe(self, rows: int, experts: float) -> None:
        """Learns the exponent from a pass, by least squares of the logarithms. experts: the mean of its layers."""
        if rows > 1:
            x, y = log(rows), log(experts / self.per_token)
            if experts >= self.experts:
                y = max(y, self.exponent * x)  # all are read: the law may say more
            self.weight = KEEP * self.weight + x * x
            self.exponent += x * (y - self.exponent * x) / self.weight

    def record(self, rows: int, experts: float, predicted: float, measured: float) -> None:
        """Adds a cycle to the sums of its rows."""
        sums = self.passes.setdefault(rows, PassSums())
        sums.passes += 1
        sums.experts += experts
        sums.predicted += predicted
        sums.measured += measured
