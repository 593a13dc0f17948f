"""compressed-tensors pack-quantized: codes of 1 to 8 bits in int32 words along K, zero points along N."""

from __future__ import annotations

import torch

from specengine.models.quantised.scale_grid import ScaleGrid
from specengine.models.quantised.settings import Scheme, Settings
from specengine.models.quantised.stored import CodedWeight, StoredModule, unpacked
from specengine.ops.coded.rows import CodedRows, Coding
from specengine.ops.weight import FLOAT_FORMATS


class PackedIntWeight(CodedWeight):
    """A packed weight [N, K]; the configuration gives its bits. Stored codes and zero points have no sign."""

    ends = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"})

    def __init__(self, stored: StoredModule, settings: Settings) -> None:
        self._stored = stored
        rows, self._words = stored.shape("weight_packed", "int32", dims=2)
        self.shape, scheme = self._shape(rows, settings)
        bits = self._bits = scheme.bits or 0
        self._grid = ScaleGrid(stored, "weight_scale", self.shape, scheme, *FLOAT_FORMATS)
        groups = -(-self.shape[1] // self._grid.group)
        self._zeros = None
        if "weight_zero_point" in stored.tensors:
            if stored.tensors["weight_zero_point"].dtype == "int8":  # of the whole tensor, which is not packed
                self._zeros = ScaleGrid(stored, "weight_zero_point", self.shape, scheme, "int8")
            else:
                stored.expect("weight_zero_point", (-(-rows * bits // 32), groups), "int32")
        elif not scheme.symmetric:
            raise stored.error("weight_zero_point", "is missing for a scheme that is not symmetric")
        self.coding = Coding("int4" if bits <= 4 else "int8", self._grid.group, zeros=True)
        if "weight_g_idx" in stored.tensors:  # act-order, which compressed-tensors had until 2026
            stored.expect("weight_g_idx", (self.shape[1],), "int32", "int64")
            self.follow(stored, "weight_g_idx", groups)

    def _shape(self, rows: int, settings: Settings) -> tuple[tuple[int, int], Scheme]:
        """Returns the weight's shape, and the first scheme of the configuration whose bits fit the words."""
        stored = self._stored
        columns = None
        if "weight_shape" in stored.tensors:
            stored.expect("weight_shape", (2,), "int64", "int32")
            said = stored.whole("weight_shape").tolist()
            columns = said[1]
            if said[0] != rows or not 0 < columns <= 32 * self._words:
                raise stored.error(
                    "weight_shape", f"is {said}, expected [{rows}, columns] for {self._words} words a row"
                )
        for scheme in settings.schemes(stored.name):
            bits = scheme.bits
            if bits is None or not 1 <= bits <= 8:
                continue
            here = self._words * 32 // bits if columns is None else columns
            if self._words in (-(-here * bits // 32), -(-here // (32 // bits))):
                return (rows, here), scheme
        raise stored.error("weight_packed", f"has {self._words} words a row, which no config group fits")

    def coded(self, start: int, stop: int) -> CodedRows:
        """See QuantisedWeight."""
        words = self._stored.rows("weight_packed", start, stop)
        scales = self._grid.scales(start, stop)
        codes = self._fields(words, self.shape[1])
        if self.order is not None:
            codes = codes[:, self.order]
        if self._zeros is not None:
            zeros = (self._zeros.numbers(start, stop).int() + 2 ** (self._bits - 1)).to(torch.uint8)
        elif "weight_zero_point" in self._stored.tensors:
            first = start // 32 * self._bits  # rows in steps of 32 begin at a word
            packed = self._stored.rows("weight_zero_point", first, -(-stop * self._bits // 32))
            fields = unpacked(packed.T, self._bits, stop - start // 32 * 32)
            zeros = fields[:, start % 32 :].T.contiguous()
        else:
            zeros = torch.full(scales.shape, 2 ** (self._bits - 1), dtype=torch.uint8)
        return CodedRows(self.coding, codes, scales, zeros)

    def _fields(self, words: torch.Tensor, count: int) -> torch.Tensor:
        if self._words == -(-count * self._bits // 32):
            return unpacked(words, self._bits, count)
        # older files: as many whole codes as a word holds
        shifts = torch.arange(0, 32 - self._bits + 1, self._bits, dtype=torch.int32)
        fields = words[..., None] >> shifts & (2**self._bits - 1)
        return fields.to(torch.uint8).view(len(words), -1)[:, :count]
