"""FP8 weights: e4m3 or e5m2 codes with scales of the tensor, of rows, of blocks, or of groups (MXFP8).

`weight_scale_inv` is a multiplier despite its name, in DeepSeek's and Qwen's files as in transformers.
"""

from __future__ import annotations

import torch

from specengine.models.quantised.scale_grid import ScaleGrid
from specengine.models.quantised.settings import Scheme
from specengine.models.quantised.stored import CodedWeight, QuantisedWeight, StoredModule
from specengine.ops.coded.rows import CodedRows, Coding

SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")  # the names that its scale has in files


def scale_end(stored: StoredModule) -> str:
    """Returns the end of the name of a module's scale. Raises ValueError where it has none."""
    for end in SCALES:
        if end in stored.tensors:
            return end
    raise stored.error("weight", f"has type {stored.tensors['weight'].dtype} but no scale, expected one of {SCALES}")


class Fp8Weight(CodedWeight):
    """An e4m3 weight [N, K]."""

    def __init__(self, stored: StoredModule, scheme: Scheme) -> None:
        self._stored = stored
        rows, columns = stored.shape("weight", "float8_e4m3fn", dims=2)
        self.shape = rows, columns
        end = scale_end(stored)
        self.ends = frozenset({"weight", end})
        self._grid = ScaleGrid(stored, end, self.shape, scheme)
        self.coding = Coding("e4m3", self._grid.group)

    def coded(self, start: int, stop: int) -> CodedRows:
        """See QuantisedWeight."""
        codes = self._stored.rows("weight", start, stop).view(torch.uint8)
        if (codes & 0x7F == 0x7F).any():
            raise self._stored.error("weight", "has codes that are not numbers, 0x7f or 0xff")
        return CodedRows(self.coding, codes, self._grid.scales(start, stop))


class E5m2Weight(QuantisedWeight):
    """An e5m2 weight [N, K], which has no coding."""

    def __init__(self, stored: StoredModule, scheme: Scheme) -> None:
        self._stored = stored
        rows, columns = stored.shape("weight", "float8_e5m2", dims=2)
        self.shape = rows, columns
        end = scale_end(stored)
        self.ends = frozenset({"weight", end})
        self._grid = ScaleGrid(stored, end, self.shape, scheme)

    def values(self, start: int, stop: int) -> torch.Tensor:
        """See QuantisedWeight."""
        numbers = self._stored.finite("weight", self._stored.rows("weight", start, stop).float())
        scales = self._grid.scales(start, stop).repeat_interleave(self._grid.group, dim=1)
        return numbers * scales[:, : self.shape[1]]
