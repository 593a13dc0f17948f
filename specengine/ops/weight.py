"""Weights in the packed form that the linear layers read, made once at load.

The core holds a weight [N, C] in panels of 16 rows: floats as [ceil(N / 16), C, 16], coded formats in blocks of 32 or
128 columns as uint8 [ceil(N / 16), blocks, bytes]. csrc/ops/packed_weight.h has the layout, and
csrc/cpu/linear/dot_codes.h turns codes into numbers. CUDA reads floats [N, C] without packing, and codes in a layout of
its own (ops/coded/weight.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import _C
from specengine.ops.coded.rows import NUMBERS, CodedRows, Coding
from specengine.utils import large_pages
from specengine.utils.host_memory import is_host

FLOAT_FORMATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BLOCK_COLUMNS = {name: columns for name, (columns, _, _) in _C.BLOCK_FORMATS.items()}
_GROUPS = {name: group for name, (_, group, _) in _C.BLOCK_FORMATS.items()}  # columns that share a scale
BLOCK_BYTES = {name: bytes for name, (_, _, bytes) in _C.BLOCK_FORMATS.items()}  # of 16 rows of a block's columns
# The format of each GGUF block type whose codes and scales the kernels read.
PACKED_BLOCKS = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4_min", "Q4_K": "q4_min"}
# The GGUF block types that the core turns into floats.
UNPACKED_BLOCKS = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})

# The formats that read each kind of codes, the most compact first.
_FORMATS_OF_KIND = {
    "int4": ("int4_128", "int4_32", "int4_min16"),
    "int8": ("int8_128", "int8_32"),
    "e2m1": ("table4_32", "table4_16"),
    "iq4": ("table4_32", "table4_16"),
    "e4m3": ("e4m3",),
}
_DOUBLED = ("e2m1",)  # halves among their numbers: the table has twice the numbers, the scales are half


@dataclass(frozen=True)
class Weight:
    """A packed weight. data: in the form above.  rows: N.  format: one of FLOAT_FORMATS or BLOCK_BYTES."""

    data: torch.Tensor
    rows: int
    format: str

    @property
    def quantises_rows(self) -> bool:
        """Whether it multiplies rows quantised to int8."""
        return quantises_rows(self.format)

    @property
    def row_dtype(self) -> torch.dtype:
        """The type of the rows that it multiplies on CUDA: its own, and bfloat16 for codes."""
        return torch.bfloat16 if self.data.dtype == torch.uint8 else self.data.dtype


def dtype_of(format: str) -> str:
    """Returns the dtype that users name for a coded format, int8 or int4; auto for floats."""
    if format in FLOAT_FORMATS:
        return "auto"
    return "int8" if format.startswith(("q8", "int8", "e4m3")) else "int4"


def quantises_rows(format: str) -> bool:
    """Says whether weights of a format multiply rows quantised to int8 on the CPU; e4m3 and floats multiply floats."""
    return format not in FLOAT_FORMATS and format != "e4m3"


@dataclass(frozen=True)
class Projection:
    """The rows of several weights one after the other, and their bias float32 [N].

    All weights multiply rows quantised to int8, or none.  columns: int32 [C], the order in which they have x's columns;
    None: as they are.  float_rows: codes multiply rows of floats on the CPU; all but e4m3 give the
    bits of their values as float32.
    """

    weights: tuple[Weight, ...]
    bias: torch.Tensor | None
    columns: torch.Tensor | None = None
    float_rows: bool = False

    @property
    def crosses_ranks(self) -> bool:
        """Whether its product needs numbers of other processes; then no op behind it can be its end."""
        return False

    @property
    def quantises_rows(self) -> bool:
        """Whether it multiplies rows quantised to int8."""
        return not self.float_rows and self.weights[0].quantises_rows

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
        blocks = -(-columns // _BLOCK_COLUMNS[format])
        shape, dtype = (panels, blocks, BLOCK_BYTES[format]), torch.uint8
    else:
        shape, dtype = (panels, columns, _C.PANEL), FLOAT_FORMATS[format]
    zeros = large_pages.zeros(shape, dtype) if is_host(device) else torch.zeros(shape, dtype=dtype, device=device)
    return Weight(zeros, rows, format)


def pack_linear(rows: torch.Tensor, weight: Weight, first: int) -> None:
    """Writes rows [R, C] (float32, bfloat16, float16) to rows [first, first + R) of a weight in the weight's format.

    The step of a row's codes in a block is absmax / 127 for q8 and (maximum - minimum) / 15 for q4_min, where the range
    always includes zero.
    """
    _C.pack_linear(rows, weight.data, first)


def pack_blocks(rows: torch.Tensor, weight: Weight, first: int, kind: str) -> None:
    """Writes rows of a GGUF file, uint8 [R, row_bytes] of a type in PACKED_BLOCKS; codes and scales stay."""
    _C.pack_blocks(rows, weight.data, first, kind)


def requantise_blocks(rows: torch.Tensor, weight: Weight, first: int, kind: str) -> None:
    """Writes rows of a GGUF file as pack_linear writes their values, to a weight of format q8 or q4_min.

    rows: uint8 [R, row_bytes] of a type in UNPACKED_BLOCKS.
    """
    _C.requantise_blocks(rows, weight.data, first, kind)


def unpack_blocks(rows: torch.Tensor, values: torch.Tensor, kind: str) -> None:
    """Writes the values of rows of a GGUF file to float32 [R, C].  rows: uint8 [R, row_bytes], as requantise_blocks."""
    _C.unpack_blocks(rows, values, kind)


def coded_format(coding: Coding, columns: int) -> str | None:
    """Returns the format that keeps the codes of a weight of so many columns; None without a kernel for it."""
    group = _whole_group(coding, columns)
    formats = ("int4_min16",) if coding.minima else _FORMATS_OF_KIND[coding.kind]
    fitting = (name for name in formats if group % _GROUPS[name] == 0)
    return next(fitting, None) if coding.kind == "int4" or not coding.minima else None


def pack_coded(rows: CodedRows, weight: Weight, first: int) -> None:
    """Writes coded rows to rows [first, first + R) of a weight of the format coded_format(); codes and scales stay.

    int4_min16 rounds scales and minima to float16. Raises ValueError for one that float16 does not hold.
    """
    coding, scales, minima = rows.coding, rows.scales, rows.minima
    zeros = table = None
    if coding.kind in ("int4", "int8"):
        zeros = torch.zeros(scales.shape, dtype=torch.uint8) if rows.zeros is None else rows.zeros
        if weight.format == "int4_min16":
            minima = -zeros.float() * scales if minima is None else minima
            zeros = None
            for name, values in (("scales", scales), ("minima", minima)):
                if not values.half().isfinite().all():
                    raise ValueError(f"{name} of {weight.format} must be finite and below 65520, for float16")
    elif weight.format != "e4m3":
        numbers = NUMBERS[coding.kind]
        if coding.kind in _DOUBLED:
            numbers, scales = 2 * numbers, scales / 2
        table = numbers.to(torch.int8).view(torch.uint8)
    group = _whole_group(coding, rows.codes.shape[1])
    _C.pack_coded(rows.codes, scales, zeros, minima, table, weight.data, first, group)


def _whole_group(coding: Coding, columns: int) -> int:
    """The columns that share a scale; a group of all columns counts as one of whole blocks."""
    return coding.group if coding.group < columns else -(-columns // 128) * 128


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
