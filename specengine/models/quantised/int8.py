"""Weights of one int8 a code: compressed-tensors int-quantized, ModelOpt, and 8-bit bitsandbytes."""

from __future__ import annotations

import torch

from specengine.models.quantised.fp8 import scale_end
from specengine.models.quantised.scale_grid import ScaleGrid
from specengine.models.quantised.settings import Scheme
from specengine.models.quantised.stored import CodedWeight, StoredModule
from specengine.ops.coded.rows import CodedRows, Coding
from specengine.ops.weight import FLOAT_FORMATS


def _unsigned(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8) ^ 0x80


class Int8Weight(CodedWeight):
    """An int8 weight [N, K] with scales and perhaps zero points, of the tensor, of rows or of groups."""

    def __init__(self, stored: StoredModule, scheme: Scheme) -> None:
        self._stored = stored
        rows, columns = stored.shape("weight", "int8", dims=2)
        self.shape = rows, columns
        end = scale_end(stored)
        self.ends = frozenset({"weight", "weight_zero_point", end})
        self._grid = ScaleGrid(stored, end, self.shape, scheme)
        self._zeros = None
        if "weight_zero_point" in stored.tensors:
            self._zeros = ScaleGrid(stored, "weight_zero_point", self.shape, scheme, "int8")
            if self._zeros.group != self._grid.group:
                raise stored.error("weight_zero_point", f"must have the shape of '{end}'")
        elif not scheme.symmetric:
            raise stored.error("weight_zero_point", "is missing for a scheme that is not symmetric")
        self.coding = Coding("int8", self._grid.group, zeros=True)

    def coded(self, start: int, stop: int) -> CodedRows:
        """See QuantisedWeight."""
        codes = _unsigned(self._stored.rows("weight", start, stop))
        scales = self._grid.scales(start, stop)
        if self._zeros is None:
            zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
        else:
            zeros = _unsigned(self._zeros.numbers(start, stop))
        return CodedRows(self.coding, codes, scales, zeros)


class BitsAndBytes8(CodedWeight):
    """An int8 weight [N, K] of bitsandbytes: a row's value is code * SCB / 127."""

    ends = frozenset({"weight", "SCB", "weight_format"})

    def __init__(self, stored: StoredModule) -> None:
        self._stored = stored
        rows, columns = stored.shape("weight", "int8", dims=2)
        self.shape = rows, columns
        stored.expect("SCB", (rows,), *FLOAT_FORMATS)
        if "weight_format" in stored.tensors:
            shape = stored.shape("weight_format", "uint8")
            if shape not in ((), (1,)) or stored.whole("weight_format").item() != 0:
                raise stored.error("weight_format", "must be 0, weights by rows")
        self.coding = Coding("int8", columns, zeros=True)

    def coded(self, start: int, stop: int) -> CodedRows:
        """See QuantisedWeight."""
        codes = _unsigned(self._stored.rows("weight", start, stop))
        peaks = self._stored.finite("SCB", self._stored.rows("SCB", start, stop).float())
        scales = (peaks / 127)[:, None]
        return CodedRows(self.coding, codes, scales, torch.full(scales.shape, 128, dtype=torch.uint8))
