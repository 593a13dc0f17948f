"""Rows of a quantised weight as its file codes them: small codes, with a scale for each group of columns.

One form for all files. Readers of checkpoints make it, the packers of weights take it, and `values` is the reference
that both are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's table of 4-bit codes
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# The number that each code stands for, by kind.
NUMBERS: dict[str, torch.Tensor] = {
    "int4": torch.arange(16.0),
    "int8": torch.arange(256.0),
    "e2m1": torch.tensor([*_E2M1, *(-number for number in _E2M1)]),
    "iq4": torch.tensor(_IQ4, dtype=torch.float32),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
}


@dataclass(frozen=True)
class Coding:
    """How a weight is coded. kind: one of NUMBERS.  group: columns that share a scale.

    zeros: the file has zero points ("int4" and "int8").  minima: it has minima ("int4").  ordered: groups do not follow
    the columns, so rows come in another order of columns (GPTQ's act-order).
    """

    kind: str
    group: int
    zeros: bool = False
    minima: bool = False
    ordered: bool = False


@dataclass(frozen=True)
class CodedRows:
    """R rows of a coded weight of C columns, G = ceil(C / group) groups.

    A value is (number - zero) * scale, or number * scale + minimum.
    codes: uint8 [R, C], one code a byte.  scales: float32 [R, G].  zeros: uint8 [R, G] or None, which stands for 0.
    minima: float32 [R, G] or None.
    """

    coding: Coding
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    minima: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> CodedRows:
        """Returns rows [start, stop)."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        minima = None if self.minima is None else self.minima[start:stop]
        return CodedRows(self.coding, self.codes[start:stop], self.scales[start:stop], zeros, minima)

    def values(self) -> torch.Tensor:
        """Returns the rows as float32 [R, C]."""
        columns = self.codes.shape[1]

        def spread(groups: torch.Tensor) -> torch.Tensor:
            return groups.float().repeat_interleave(self.coding.group, dim=1)[:, :columns]

        numbers = NUMBERS[self.coding.kind][self.codes.int()]
        if self.zeros is not None:
            numbers -= spread(self.zeros)
        rows = numbers * spread(self.scales)
        return rows if self.minima is None else rows + spread(self.minima)
