"""Weights of e2m1 codes, two a byte, even columns in the low half: NVFP4 and MXFP4; and the e2m3 codes of MXFP6.

NVFP4 has e4m3 scales of 16 columns and one of the tensor, which divides in compressed-tensors (`weight_global_scale`)
and multiplies in ModelOpt (`weight_scale_2`). The MX formats have powers of two of 32 columns.
"""

from __future__ import annotations

import torch

from specengine.models.quantised.stored import EXPONENTS, CodedWeight, QuantisedWeight, StoredModule, powers, unpacked
from specengine.ops.coded.rows import CodedRows, Coding

_E2M3 = torch.tensor([m / 8 for m in range(8)] + [(1 + m / 8) * 2**e for e in range(3) for m in range(8)])


class Fp4Weight(CodedWeight):
    """A packed weight uint8 [N, K/2]. end: of its name, "weight_packed" or "weight"."""

    def __init__(self, stored: StoredModule, end: str) -> None:
        self._stored = stored
        self._end = end
        rows, width = stored.shape(end, "uint8", dims=2)
        self.shape = rows, 2 * width
        tensor_wide = [each for each in ("weight_global_scale", "weight_scale_2") if each in stored.tensors]
        if len(tensor_wide) > 1:
            raise stored.error(
                tensor_wide[0], f"and '{tensor_wide[1]}' are both there, expected one scale of the tensor"
            )
        stored.shape("weight_scale", "float8_e4m3fn", *EXPONENTS)
        is_mx = stored.tensors["weight_scale"].dtype in EXPONENTS
        group = 32 if is_mx else 16
        if self.shape[1] % group:
            raise stored.error(end, f"has {2 * width} columns, expected a multiple of {group}")
        stored.expect("weight_scale", (rows, self.shape[1] // group), "float8_e4m3fn", *EXPONENTS)
        if is_mx == bool(tensor_wide):
            problem = "is not MXFP4's" if is_mx else "or 'weight_scale_2' is missing beside NVFP4's scales"
            raise stored.error(tensor_wide[0] if is_mx else "weight_global_scale", problem)
        self._divisor = self._factor = None
        if tensor_wide:
            factor = stored.number(tensor_wide[0])
            if tensor_wide[0] == "weight_global_scale":
                self._divisor = factor
            else:
                self._factor = factor
        self.ends = frozenset({end, "weight_scale", *tensor_wide})
        self.coding = Coding("e2m1", group)

    def coded(self, start: int, stop: int) -> CodedRows:
        """See QuantisedWeight."""
        codes = unpacked(self._stored.rows(self._end, start, stop), 4, self.shape[1])
        scales = self._stored.rows("weight_scale", start, stop)
        if self._divisor is not None:
            scales = scales.float() / self._divisor
        elif self._factor is not None:
            scales = scales.float() * self._factor
        else:
            scales = powers(scales)
        return CodedRows(self.coding, codes, self._stored.finite("weight_scale", scales))


class Mxfp6Weight(QuantisedWeight):
    """A packed weight uint8 [N, 3 K/4] of e2m3 codes, which has no coding."""

    ends = frozenset({"weight_packed", "weight_scale"})

    def __init__(self, stored: StoredModule) -> None:
        self._stored = stored
        rows, width = stored.shape("weight_packed", "uint8", dims=2)
        if width % 24:
            raise stored.error("weight_packed", f"has {width} bytes a row, expected a multiple of 24 for MXFP6")
        self.shape = rows, width * 4 // 3
        stored.expect("weight_scale", (rows, self.shape[1] // 32), *EXPONENTS)

    def values(self, start: int, stop: int) -> torch.Tensor:
        """See QuantisedWeight."""
        codes = unpacked(self._stored.rows("weight_packed", start, stop), 6, self.shape[1]).int()
        numbers = torch.where(codes < 32, 1, -1) * _E2M3[codes & 31]
        scales = self._stored.finite("weight_scale", powers(self._stored.rows("weight_scale", start, stop)))
        return numbers * scales.repeat_interleave(32, dim=1)
