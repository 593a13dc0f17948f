"""GPTQ weights of 2, 3, 4 and 8 bits, in the layout of AutoGPTQ and GPTQModel, with and without act-order.

Version 1 stores zero points less one. GPTQModel subtracts from whole words of fields, with borrows, so that the one is
added to words too; fields of 3 bits lie across words, where both libraries count each by itself.
"""

from __future__ import annotations

import torch

from specengine.models.quantised.settings import Scheme
from specengine.models.quantised.stored import CodedWeight, StoredModule, group_size, unpacked
from specengine.ops.coded.rows import CodedRows, Coding
from specengine.ops.weight import FLOAT_FORMATS

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a one in each field of a word


class GptqWeight(CodedWeight):
    """qweight int32 [K * bits / 32, N] packed along K, qzeros int32 [G, N * bits / 32], scales [G, N], g_idx [K]."""

    ends = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, stored: StoredModule, scheme: Scheme, less_one: bool) -> None:
        self._stored = stored
        self._less_one = less_one
        if scheme.bits not in (2, 3, 4, 8):
            raise stored.error("qweight", f"is said to have {scheme.bits} bits, expected 2, 3, 4 or 8")
        bits = self._bits = scheme.bits
        words, rows = stored.shape("qweight", "int32", dims=2)
        columns = words * 32 // bits
        if "g_idx" in stored.tensors:
            (columns,) = stored.shape("g_idx", "int32", "int64", dims=1)
            if words not in (-(-columns * bits // 32), -(-columns // 32) * bits):
                raise stored.error("g_idx", f"has {columns} elements, which {words} rows of 'qweight' do not hold")
        self.shape = rows, columns
        groups, width = stored.shape("scales", *FLOAT_FORMATS, dims=2)
        if width != rows:
            raise stored.error("scales", f"has shape {(groups, width)}, expected [groups, {rows}]")
        stored.expect("qzeros", (groups, -(-rows * bits // 32)), "int32")
        group = group_size(stored, "scales", groups, columns, scheme.group)
        self.coding = Coding("int4" if bits <= 4 else "int8", group, zeros=True)
        if "g_idx" in stored.tensors:
            self.follow(stored, "g_idx", groups)

    def coded(self, start: int, stop: int) -> CodedRows:
        """See QuantisedWeight."""
        codes = unpacked(self._stored.columns("qweight", start, stop).T, self._bits, self.shape[1])
        if self.order is not None:
            codes = codes[:, self.order]
        scales = self._stored.columns("scales", start, stop).T.float().contiguous()
        scales = self._stored.finite("scales", scales)
        return CodedRows(self.coding, codes, scales, self._zeros(start, stop))

    def _zeros(self, start: int, stop: int) -> torch.Tensor:
        first = start // 32 * 32  # outputs in steps of 32 begin at a word
        words = self._stored.columns("qzeros", first * self._bits // 32, -(-stop * self._bits // 32))
        if self._less_one and self._bits != 3:
            words = words + _ONES[self._bits]
        fields = unpacked(words, self._bits, stop - first)
        if self._less_one and self._bits == 3:
            fields = fields + 1 & 7
        return fields[:, start - first :].T.contiguous()
