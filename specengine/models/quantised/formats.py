"""In which packed format a loader holds each matrix: the matrices of one product agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.models.checkpoint_base import Checkpoint
from specengine.models.gated_delta.weights import GATES
from specengine.ops import Ops
from specengine.ops.weight import FLOAT_FORMATS, PACKED_BLOCKS, quantises_rows


class WeightFormats:
    """Chooses the formats of a checkpoint's matrices; names are without `.weight`.

    dtype: as users give it, `auto` for `auto-float32`.  float_rows: codes multiply rows of floats on the CPU.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, float_rows: bool, ops: Ops) -> None:
        self.checkpoint, self.dtype, self.float_rows, self.ops = checkpoint, dtype, float_rows, ops
        self._ends = ("embed_tokens",) if checkpoint.drafts else ("embed_tokens", "lm_head")  # 8 bits of int4

    def of_product(self, names: Sequence[str]) -> list[str]:
        """Chooses the format of each matrix of a product: all multiply rows of int8 in one order, or rows of floats.

        Several float types become one: float16 overflows earlier than the others, and bfloat16 rounds more.
        """
        formats = [self._stored(name) for name in names]
        wide = [form for name, form in zip(names, formats, strict=True) if not name.endswith(GATES)]
        ordered = names
        if self.dtype == "auto" and not self.float_rows and wide and all(map(quantises_rows, wide)):
            # a float row for each head would make floats of thousands of quantised rows
            ordered = [name for name, form in zip(names, formats, strict=True) if form not in FLOAT_FORMATS]
            formats = ["q8" if form in FLOAT_FORMATS else form for form in formats]
        orders = [self.column_order(name) for name in ordered]
        kinds = {order if order is None else tuple(order.tolist()) for order in orders}
        if len(kinds) > 1 or (self.float_rows and kinds != {None}):  # rows of floats stay in their order
            formats = [self.ops.dequantised] * len(names)
        if all(map(quantises_rows, formats)):
            return formats
        floats = {form for form in formats if form in FLOAT_FORMATS}
        stay = {form for form in formats if form not in FLOAT_FORMATS and (self.float_rows or not quantises_rows(form))}
        if any(form not in floats | stay and self.keeps_codes(name) for name, form in zip(names, formats, strict=True)):
            floats.add(self.ops.dequantised)
        common = floats.pop() if len(floats) == 1 else "float32"
        return [form if form in stay else common for form in formats]

    def of_experts(self, parts: Sequence[Sequence[str]]) -> list[str]:
        """Chooses the format of each part of a product of all experts. parts: a matrix of each expert."""
        everything = [name for part in parts for name in part]
        if any(self.column_order(name) is not None for name in everything):  # each expert has its own order
            return [self.ops.dequantised] * len(parts)
        formats, count = self.of_product(everything), len(parts[0])
        kinds = [set(formats[first : first + count]) for first in range(0, len(formats), count)]
        if any(len(own) > 1 for own in kinds):
            return [self.ops.dequantised] * len(parts)
        return [own.pop() for own in kinds]

    def keeps_codes(self, name: str) -> bool:
        """Returns whether a matrix has codes in the file that its format may keep."""
        return self.dtype == "auto" and self.checkpoint.tensors[f"{name}.weight"].coding is not None

    def column_order(self, name: str) -> torch.Tensor | None:
        """The order in which the codes of a matrix that keeps them have its columns, int64 [C]; None: as they are."""
        return self.checkpoint.column_order(f"{name}.weight") if self.keeps_codes(name) else None

    def _stored(self, name: str) -> str:
        info = self.checkpoint.tensors[f"{name}.weight"]
        if self.dtype == "int4":
            return "q8" if name.endswith(self._ends) else "q4_min"
        if self.dtype == "int8":
            return "q8"
        if self.dtype != "auto":
            return self.dtype
        if info.coding is not None:
            if info.coding.ordered and name.endswith(("embed_tokens", "lm_head")):
                return self.ops.dequantised  # drafters read these in their own order
            kept = self.ops.coded_format(info.coding, info.shape[1])
            if self.float_rows and info.coding.zeros and kept == "int4_min16":
                return self.ops.dequantised  # it would round scales and minima to float16
            return kept if kept in self.ops.formats else self.ops.dequantised
        if info.dtype in FLOAT_FORMATS:
            return info.dtype
        kept = PACKED_BLOCKS.get(info.dtype, "q8")  # blocks of 5 and 6 bits are requantised to 8
        return kept if kept in self.ops.formats else self.ops.dequantised
