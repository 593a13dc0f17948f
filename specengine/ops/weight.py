"""Weights in the packed form that the linear layers read, made once at load.

The core holds a weight [N, C] in panels of 16 rows: floats as [ceil(N / 16), C, 16], the quantised formats in blocks of
32 columns as uint8 [ceil(N / 16), ceil(C / 32), bytes]. csrc/ops/packed_weight.h has the layout, csrc/cpu/dot_codes.h
turns codes into numbers. CUDA reads floats [N, C] without packing, and codes in a layout
of its own (ops/coded/weight.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import _C

FLOAT_FORMATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCK_BYTES = {"q8": _C.Q8_BYTES, "q4": _C.Q4_BYTES, "q4_min": _C.Q4_MIN_BYTES}  # of 16 x 32 weights
DTYPE_OF_BLOCKS = {"q8": "int8", "q4": "int4", "q4_min": "int4"}  # as users name the formats
# The format of each GGUF block type whose codes and scales the kernels read.
PACKED_BLOCKS = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4_min", "Q4_K": "q4_min"}


@dataclass(frozen=True)
class Weight:
    """A packed weight. data: in the form above.  rows: N.  format: one of FLOAT_FORMATS or BLOCK_BYTES."""

    data: torch.Tensor
    rows: int
    format: str

    @property
    def quantised(self) -> bool:
        return self.format in BLOCK_BYTES

    @property
    def row_dtype(self) -> torch.dtype:
        """The type of the rows that it multiplies on CUDA: its own, and bfloat16 for codes."""
        return torch.bfloat16 if self.data.dtype == torch.uint8 else self.data.dtype


@dataclass(frozen=True)
class Projection:
    """The rows of several weights one after the other, and their bias float32 [N]; all quantised or none."""

    weights: tuple[Weight, ...]
    bias: torch.Tensor | None

    @property
    def rows(self) -> int:
        return sum(weight.rows for weight in self.weights)

    @property
    def nbytes(self) -> int:
        return sum(weight.data.nbytes for weight in self.weights)


def empty_weight(rows: int, columns: int, format: str, device: torch.device) -> Weight:
    """Room for a weight [rows, columns], to be filled by pack_linear or pack_blocks."""
    panels = -(-rows // _C.PANEL)
    if format in BLOCK_BYTES:
        # Zeros, because the kernels multiply the rows past N and the padded columns too.
        data = torch.zeros(panels, -(-columns // _C.BLOCK), BLOCK_BYTES[format], dtype=torch.uint8, device=device)
    else:
        data = torch.empty(panels, columns, _C.PANEL, dtype=FLOAT_FORMATS[format], device=device)
        data[-1:].zero_()
    return Weight(data, rows, format)


def pack_linear(rows: torch.Tensor, weight: Weight, first: int) -> None:
    """Writes rows [R, C] (float32, bfloat16, float16) to rows [first, first + R) of a weight in the weight's format.

    The step of a row's codes in a block is absmax / 127 for q8 and (maximum - minimum) / 15 for q4_min, where the range
    always includes zero.
    """
    _C.pack_linear(rows, weight.data, first)


def pack_blocks(rows: torch.Tensor, weight: Weight, first: int, kind: str) -> None:
    """Writes rows of a GGUF file, uint8 [R, row_bytes] of a type in PACKED_BLOCKS; codes and scales stay."""
    _C.pack_blocks(rows, weight.data, first, kind)


def gather_rows(weight: Weight, ids: torch.Tensor, out: torch.Tensor) -> None:
    """out[M, C] = rows `ids` (int32 [M]) of a weight.

    On the CPU raises ValueError for an id out of range. On CUDA such an id gives zeros; -1 stands for padding.
    """
    _C.gather_rows(weight.data, ids, out)


def empty_weight_reference(rows: int, columns: int, format: str, device: torch.device) -> Weight:
    """Room for a weight that stays [N, C], floats only."""
    if format not in FLOAT_FORMATS:
        raise ValueError(f"format: {format} has no reference, expected one of {', '.join(FLOAT_FORMATS)}")
    return Weight(torch.empty(rows, columns, dtype=FLOAT_FORMATS[format], device=device), rows, format)


def pack_linear_reference(rows: torch.Tensor, weight: Weight, first: int) -> None:
    weight.data[first : first + rows.shape[0]] = rows.to(weight.data.dtype)


def gather_rows_reference(weight: Weight, ids: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(weight.data[ids.long()])
