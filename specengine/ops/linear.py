"""Linear layers over prepared weights (ops/weight.py).

Shapes: M rows, C input columns, N output columns. A quantised weight multiplies rows quantised to int8 in blocks of 32
columns; integers are exact, so a row's bits do not depend on M, on the threads or on how an instruction set multiplies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specengine import _C
from specengine.ops.weight import Linear


def quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """x float32 [M, C] as uint8 [M, ceil(C / 32), 44]: 32 int8 codes, float32 scale and scaled sum, int32 sum."""
    out = torch.empty(x.shape[0], -(-x.shape[1] // _C.BLOCK), _C.ROW_BLOCK_BYTES, dtype=torch.uint8)
    _C.quantise_rows(x, out)
    return out


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """x[M, C] @ weight^T + bias, float32 [M, N]; a row's bits do not depend on M."""
    out, first, rows = torch.empty(x.shape[0], layer.rows), 0, _rows_for(x, layer)
    for weight in layer.weights:
        _C.linear(rows, weight.data, layer.bias, out, first, weight.rows)
        first += weight.rows
    return out


def linear_argmax(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """int32 [M]: the lowest index of the largest entry of each row of linear(x), which is not stored.

    -1 where the row has a NaN or its largest entry is infinite. The layer has one weight.
    """
    (weight,) = layer.weights
    ids, keys = torch.empty(x.shape[0], dtype=torch.int32), torch.empty(x.shape[0], dtype=torch.int64)
    _C.linear_argmax(_rows_for(x, layer), weight.data, layer.bias, ids, keys, weight.rows)
    return ids


def _rows_for(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    return quantise_rows(x) if layer.weights[0].quantised else x


def linear_reference(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    out = torch.cat([F.linear(x.to(weight.data.dtype), weight.data).float() for weight in layer.weights], dim=1)
    return out if layer.bias is None else out + layer.bias


def linear_argmax_reference(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    scores = linear_reference(x, layer)
    top, ids = scores.max(dim=1)  # torch takes the lowest index of equal maxima, and a NaN for the largest
    return torch.where(top.isfinite(), ids, -1).int()
