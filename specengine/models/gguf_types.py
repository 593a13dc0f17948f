"""Types of GGUF files: the blocks of tensors with their sizes, and the values of metadata.

The numbers are those of the gguf package, which takes most of a second to import: only the rarer blocks need it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch

from specengine.ops.weight import UNPACKED_BLOCKS, unpack_blocks

DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# Number of a metadata type -> numpy's name of its values.
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


class BlockType(IntEnum):
    """How a tensor is stored."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @property
    def columns(self) -> int:
        """Weights of a block."""
        return _SIZES[self.name][0]

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return _SIZES[self.name][1]


# Weights and bytes of a block.
_SIZES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "F64": (1, 8),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 40),
    "IQ4_NL": (32, 18),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "Q1_0": (128, 18),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
}


def block_values(rows: np.ndarray, kind: BlockType) -> torch.Tensor:
    """Returns the values of stored rows, float32 [R, C].  rows: uint8 [R, row_bytes], of blocks."""
    if kind.name in UNPACKED_BLOCKS:
        values = torch.empty(len(rows), rows.shape[1] // kind.nbytes * kind.columns)
        unpack_blocks(torch.from_numpy(np.ascontiguousarray(rows)), values, kind.name)
        return values
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType(kind)))
