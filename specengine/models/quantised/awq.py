"""AWQ weights of AutoAWQ, 4 bits: `gemm` packs neighbouring outputs in a shuffled order, `gemv` inputs in order."""

from __future__ import annotations

import torch

from specengine.models.quantised.settings import Scheme
from specengine.models.quantised.stored import CodedWeight, StoredModule, group_size, unpacked
from specengine.ops.coded.rows import CodedRows, Coding
from specengine.ops.weight import FLOAT_FORMATS

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of a word that holds each of its eight outputs


def _check_bits(stored: StoredModule, scheme: Scheme) -> None:
    if scheme.bits not in (None, 4):
        raise stored.error("qweight", f"is said to have {scheme.bits} bits, expected 4 in AWQ files")


class AwqGemmWeight(CodedWeight):
    """qweight int32 [K, N/8], scales [G, N], and qzeros int32 [G, N/8] unless the scheme is symmetric."""

    ends = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, stored: StoredModule, scheme: Scheme) -> None:
        self._stored = stored
        _check_bits(stored, scheme)
        columns, words = stored.shape("qweight", "int32", dims=2)
        self.shape = 8 * words, columns
        groups, rows = stored.shape("scales", *FLOAT_FORMATS, dims=2)
        if rows != 8 * words:
            raise stored.error("scales", f"has shape {(groups, rows)}, expected [groups, {8 * words}]")
        if not scheme.symmetric or "qzeros" in stored.tensors:
            stored.expect("qzeros", (groups, words), "int32")
        self.coding = Coding("int4", group_size(stored, "scales", groups, columns, scheme.group), zeros=True)

    def coded(self, start: int, stop: int) -> CodedRows:
        """See QuantisedWeight."""
        scales = self._stored.columns("scales", start, stop).T.float().contiguous()
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
        if "qzeros" in self._stored.tensors:
            zeros = self._outputs("qzeros", start, stop)
        codes = self._outputs("qweight", start, stop)
        return CodedRows(self.coding, codes, self._stored.finite("scales", scales), zeros)

    def _outputs(self, end: str, start: int, stop: int) -> torch.Tensor:
        first = start // 8
        words = self._stored.columns(end, first, -(-stop // 8)).T.contiguous()
        fields = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8)
        for output, place in enumerate(_PLACES):
            fields[:, output] = words >> 4 * place & 15
        return fields.view(-1, words.shape[1])[start - 8 * first : stop - 8 * first]


class AwqGemvWeight(CodedWeight):
    """qweight int32 [N, K/8], qzeros int32 [N, words], scales [N, 8 * words]; the last groups are padding."""

    ends = AwqGemmWeight.ends

    def __init__(self, stored: StoredModule, scheme: Scheme) -> None:
        self._stored = stored
        _check_bits(stored, scheme)
        rows, words = stored.shape("qweight", "int32", dims=2)
        columns = 8 * words
        self.shape = rows, columns
        group = columns if scheme.group is None or scheme.group < 1 else min(scheme.group, columns)
        self._groups = -(-columns // group)
        held = stored.shape("qzeros", "int32", dims=2)
        if held[0] != rows or 8 * held[1] < self._groups:
            raise stored.error(
                "qzeros", f"has shape {held}, expected {rows} rows of {self._groups} zeros in groups of 8"
            )
        stored.expect("scales", (rows, 8 * held[1]), *FLOAT_FORMATS)
        self.coding = Coding("int4", group, zeros=True)

    def coded(self, start: int, stop: int) -> CodedRows:
        """See QuantisedWeight."""
        codes = unpacked(self._stored.rows("qweight", start, stop), 4, self.shape[1])
        zeros = unpacked(self._stored.rows("qzeros", start, stop), 4, self._groups)
        scales = self._stored.rows("scales", start, stop)[:, : self._groups].float()
        return CodedRows(self.coding, codes, self._stored.finite("scales", scales), zeros)
