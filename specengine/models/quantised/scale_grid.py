"""Scales of a weight that is stored one code a byte: of the tensor, of its rows, of groups of columns or of blocks."""

from __future__ import annotations

import math

import torch

from specengine.models.quantised.settings import Scheme
from specengine.models.quantised.stored import EXPONENTS, StoredModule, group_size, powers
from specengine.ops.weight import FLOAT_FORMATS

_USUAL_BLOCK = (128, 128)


class ScaleGrid:
    """A tensor with one number for each group of columns of some rows of a weight [N, K]. group: columns.

    Raises ValueError for a shape that fits no strategy, and for one scale where the scheme says groups or blocks.
    """

    def __init__(self, stored: StoredModule, end: str, shape: tuple[int, int], scheme: Scheme, *dtypes: str) -> None:
        self._stored = stored
        self._end = end
        found = stored.shape(end, *(dtypes or (*FLOAT_FORMATS, *EXPONENTS)))
        self._scalar = math.prod(found) == 1
        rows, columns = shape
        divided = scheme.divides(rows, columns)
        # ModelOpt writes blocks as [rows, 1, columns, 1]
        grid = (*found, 1) if len(found) == 1 else found[::2] if len(found) == 4 and found[1::2] == (1, 1) else found
        height, width = scheme.block or _USUAL_BLOCK
        blocks = -(-rows // height), -(-columns // width)
        if self._scalar and not divided:
            self._rows, self.group = rows, columns
        elif scheme.block is not None and grid == blocks:
            self._rows, self.group = height, min(width, columns)
        elif len(grid) == 2 and grid[0] == rows and grid[1] > 1:
            self._rows, self.group = 1, group_size(stored, end, grid[1], columns, scheme.group)
        elif grid == (rows, 1) and not divided:
            self._rows, self.group = 1, columns
        elif grid == blocks and not self._scalar:
            self._rows, self.group = height, min(width, columns)
        else:
            groups = () if scheme.group is None or scheme.group < 1 else ((rows, -(-columns // scheme.group)),)
            whole = () if divided else ((1,), (rows, 1))
            expected = " or ".join(str(each) for each in (*whole, *groups, blocks))
            raise stored.error(end, f"has shape {found}, expected {expected} for a weight of shape {shape}")
        self._groups = 1 if self._scalar else grid[1]

    def numbers(self, start: int, stop: int) -> torch.Tensor:
        """Reads what rows [start, stop) of the weight have, [R, G] in the tensor's type."""
        if self._scalar:
            return self._stored.whole(self._end).view(1, 1).repeat(stop - start, 1)
        first = start // self._rows
        held = self._stored.rows(self._end, first, -(-stop // self._rows)).view(-1, self._groups)
        return held if self._rows == 1 else held.view(-1, self._groups)[torch.arange(start, stop) // self._rows - first]

    def scales(self, start: int, stop: int) -> torch.Tensor:
        """Reads the scales of rows [start, stop), float32 [R, G]. Raises ValueError for one that is not finite."""
        numbers = self.numbers(start, stop)
        floats = powers(numbers) if numbers.dtype in (torch.uint8, torch.float8_e8m0fnu) else numbers.float()
        return self._stored.finite(self._end, floats)
