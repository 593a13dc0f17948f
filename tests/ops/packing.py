"""Weights in every format, and the values they hold."""

from __future__ import annotations

import numpy as np
import torch

from specengine.ops.linear import quantise_rows
from specengine.ops.weight import (
    BLOCK_BYTES,
    FLOAT_FORMATS,
    Weight,
    empty_weight,
    gather_rows,
    pack_blocks,
    pack_coded,
    pack_linear,
)
from tests.ops.coding import CODED, coded

CPU = torch.device("cpu")
QUANTISED = tuple(BLOCK_BYTES)
FORMATS = (*FLOAT_FORMATS, *QUANTISED)

ROW_BLOCK = np.dtype([("code", "i1", 32), ("scale", "f4"), ("sum", "f4"), ("code_sum", "i4")])


def packed(rows: torch.Tensor, form: str) -> Weight:
    """Rows [N, C] in a format: q4, which takes no floats, by way of the file format Q4_0, others as coded rows."""
    weight = empty_weight(*rows.shape, form, CPU)
    write(rows, weight, 0)
    return weight


def write(rows: torch.Tensor, weight: Weight, first: int) -> None:
    """Writes rows [R, C] to rows [first, first + R) of a weight, as `packed` does."""
    if weight.format in CODED:
        pack_coded(coded(rows, CODED[weight.format]), weight, first)
    elif weight.format == "q4":
        from gguf import GGMLQuantizationType, quants  # here: a machine with a GPU may lack it

        padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % 32))
        pack_blocks(torch.from_numpy(quants.quantize(padded.numpy(), GGMLQuantizationType.Q4_0)), weight, first, "Q4_0")
    else:
        pack_linear(rows, weight, first)


def values_of(weight: Weight, columns: int) -> torch.Tensor:
    """float32 [N, C]: what a packed weight holds."""
    out = torch.full((weight.rows, columns), torch.nan)
    gather_rows(weight, torch.arange(weight.rows, dtype=torch.int32), out)
    return out


def row_blocks(x: torch.Tensor) -> np.ndarray:
    """Quantised rows of x [M, C] as records [M, C / 32]."""
    return quantise_rows(x).numpy().view(ROW_BLOCK)[..., 0]


def values_of_rows(x: torch.Tensor) -> torch.Tensor:
    """float64 [M, C]: what quantised rows stand for."""
    blocks = row_blocks(x)
    values = blocks["code"].astype(np.float64) * blocks["scale"][..., None]
    return torch.from_numpy(values.reshape(len(x), 32 * blocks.shape[1])[:, : x.shape[1]])
