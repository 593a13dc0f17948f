"""Linear layers on CUDA whose weights stay in codes (ops/coded/weight.py).

A value of the weight is computed in float32 and rounded to bfloat16, as x is: the product is that of x with a weight
that was dequantised and rounded so. Its sums are float32 and of one order for all M, so a row's bits do
not depend on M; the order is another one than that of linear_cuda.
"""

from __future__ import annotations

import torch

from specengine import _C
from specengine.ops.coded.weight import FORMS, coded_values
from specengine.ops.weight import Weight
from specengine.ops.weight import gather_rows as gather_floats


def coded_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor, first: int) -> None:
    """out[:, first : first + N] = x[M, C] @ weight^T + bias of these columns; x becomes bfloat16."""
    _C.coded_linear(x.bfloat16(), weight.data, FORMS[weight.format], bias, out, first, weight.rows)


def coded_linear_argmax(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """int32 [M]: the lowest index of the largest entry of each row of the product, which is not stored.

    -1 where the row has a NaN or its largest entry is infinite.
    """
    ids, keys = (torch.empty(x.shape[0], dtype=dtype, device=x.device) for dtype in (torch.int32, torch.int64))
    _C.coded_linear_argmax(x.bfloat16(), weight.data, FORMS[weight.format], bias, ids, keys, weight.rows)
    return ids


def gather_rows(weight: Weight, ids: torch.Tensor, out: torch.Tensor) -> None:
    """out[M, C] = rows `ids` (int32 [M]) of a weight on CUDA, floats or codes; an id that is no row gives zeros."""
    if weight.format in FORMS:
        _C.gather_coded(weight.data, FORMS[weight.format], ids, out)
    else:
        gather_floats(weight, ids, out)


def coded_linear_reference(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """float32 [M, N]: the product of coded_linear, with sums in float64."""
    out = x.bfloat16().double() @ coded_values(weight, x.shape[1]).bfloat16().double().T
    return (out if bias is None else out + bias.double()).float()
