"""Linear layers over packed weights (ops/weight.py).

Shapes: M rows, C input columns, N output columns. On the CPU integer codes multiply rows quantised to int8 in blocks of
32 columns; integers are exact, so a row's bits do not depend on M, on the threads or on how an instruction set
multiplies. Floats and e4m3 multiply floats.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from specengine import _C
from specengine.draft_trees.token_masks import unpack_masks
from specengine.ops.coded.linear import coded_linear, coded_linear_argmax
from specengine.ops.coded.weight import FORMS
from specengine.ops.experts.moe import ExpertProjection
from specengine.ops.growth.add_delta import rounded
from specengine.ops.weight import Projection

CPU_VARIANT = 0  # the CPU has one kernel, CUDA several
LIBRARY = -1  # in place of a variant of the CUDA kernel: torch's own product


class VariantChooser(Protocol):
    """Chooses how to multiply; see autotune.LinearChoices."""

    def choose(self, weight: torch.Tensor, rows: int) -> int:
        """Returns the variant of the kernel for a weight and a number of rows."""
        ...


def quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """x float32 [M, C] as uint8 [M, ceil(C / 32), 44]: 32 int8 codes, float32 scale and scaled sum, int32 sum."""
    out = torch.empty(x.shape[0], -(-x.shape[1] // _C.BLOCK), _C.ROW_BLOCK_BYTES, dtype=torch.uint8)
    _C.quantise_rows(x, out, None)
    return out


def linear(x: torch.Tensor, layer: Projection, masks: torch.Tensor | None = None) -> torch.Tensor:
    """x[M, C] @ weight^T + bias, float32 [M, N]; a row's bits do not depend on M.

    masks: int32 [M, ceil(N / 32)], the entries to be read, of a layer of one weight; None: all. Of 16 neighbours that
    no row reads, none is computed: they are 0. Raises ValueError for masks and several weights.
    """
    if masks is not None and len(layer.weights) > 1:
        raise ValueError(f"masks: expected None for a layer of {len(layer.weights)} weights, got a tensor")
    shape, first, rows = (x.shape[0], layer.rows), 0, _ordered_rows(x, layer)
    out = torch.empty(shape)  # torch.zeros of a whole vocabulary wakes torch's threads, which then spin on our cores
    for weight in layer.weights:
        _C.linear(rows, weight.data, layer.bias, out, first, weight.rows, CPU_VARIANT, masks)
        first += weight.rows
    return out


def linear_argmax(x: torch.Tensor, layer: Projection, masks: torch.Tensor | None = None) -> torch.Tensor:
    """int32 [M]: the lowest index of the largest entry of each row of linear(x), which is not stored.

    masks: int32 [M, ceil(N / 32)], the entries that count (see draft_trees.token_masks); None: all. The rest is not
    computed.  -1 where the row has a NaN or its largest entry is infinite. The layer has one weight.
    """
    (weight,) = layer.weights
    ids, keys = torch.empty(x.shape[0], dtype=torch.int32), torch.empty(x.shape[0], dtype=torch.int64)
    _C.linear_argmax(_ordered_rows(x, layer), weight.data, layer.bias, masks, ids, keys, weight.rows, CPU_VARIANT)
    return ids


def _ordered_rows(x: torch.Tensor, layer: Projection) -> torch.Tensor:
    return rows_for(x if layer.columns is None else x[:, layer.columns], layer)


def rows_for(x: torch.Tensor, layer: Projection | ExpertProjection) -> torch.Tensor:
    """x float32 [M, C] as a layer's weights multiply it on the CPU; its columns are in their order."""
    return quantise_rows(x) if layer.quantises_rows else x


def linear_cuda(
    x: torch.Tensor,
    layer: Projection,
    choices: VariantChooser,
    masks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x[M, C] @ weight^T + bias, float32 [M, N], with x rounded to the weights' dtype.

    The layer's weights are floats [N, C], multiplied in the way that `choices` chose, or codes (coded_linear). A row's
    bits do not depend on M if the choices are strict.  out: is written and returned.
    Raises ValueError for masks, which the host completes after the product.
    """
    if masks is not None:
        raise ValueError("masks: expected None on cuda, got a tensor")
    if layer.columns is not None:
        x = x[:, layer.columns]
    first = 0
    if out is None:
        out = torch.empty(x.shape[0], layer.rows, device=x.device)
    for weight in layer.weights:
        if weight.format in FORMS:
            coded_linear(x, weight, layer.bias, out, first)
        else:
            multiply(x, weight.data, layer.bias, out, first, choices.choose(weight.data, x.shape[0]))
        first += weight.rows
    return out


def multiply(x, weight, bias, out, first: int, variant: int) -> None:
    """out[:, first : first + N] = x @ weight[N, C]^T + bias of these columns, by a variant of the kernel or LIBRARY."""
    x = rounded(x, weight.dtype)
    if variant != LIBRARY:
        _C.linear(x, weight, bias, out, first, len(weight), variant, None)
        return
    columns = out if out.shape[1] == len(weight) else out.narrow(1, first, len(weight))
    if x.is_cuda and x.dtype != torch.float32:
        torch.mm(x, weight.T, out_dtype=torch.float32, out=columns)
    else:
        torch.mm(x.float(), weight.float().T, out=columns)
    if bias is not None:
        columns += bias[first : first + len(weight)]


def linear_argmax_cuda(
    x: torch.Tensor, layer: Projection, choices: VariantChooser, masks: torch.Tensor | None = None
) -> torch.Tensor:
    """linear_argmax of linear_cuda's product, which is stored only if the library multiplies.

    Raises ValueError for masks: a cycle on a device reads logits.
    """
    if masks is not None:
        raise ValueError("masks: expected None on cuda, got a tensor")
    (weight,) = layer.weights
    if weight.format in FORMS:
        return coded_linear_argmax(x, weight, layer.bias)
    variant = choices.choose(weight.data, x.shape[0])
    if variant == LIBRARY:
        return _finite_argmax(linear_cuda(x, layer, choices))
    ids, keys = (torch.empty(x.shape[0], dtype=dtype, device=x.device) for dtype in (torch.int32, torch.int64))
    _C.linear_argmax(x.to(weight.data.dtype), weight.data, layer.bias, None, ids, keys, weight.rows, variant)
    return ids


def linear_reference(x: torch.Tensor, layer: Projection, masks: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.cat([F.linear(x.to(weight.data.dtype), weight.data).float() for weight in layer.weights], dim=1)
    return out if layer.bias is None else out + layer.bias


def linear_argmax_reference(x: torch.Tensor, layer: Projection, masks: torch.Tensor | None = None) -> torch.Tensor:
    scores = linear_reference(x, layer)
    if masks is not None:
        scores = scores.masked_fill(~unpack_masks(masks.to(scores.device), layer.rows), -torch.inf)
    return _finite_argmax(scores)


def _finite_argmax(scores: torch.Tensor) -> torch.Tensor:
    top, ids = scores.max(dim=1)  # torch takes the lowest index of equal maxima and ranks NaN highest
    return ids.masked_fill(~top.isfinite(), -1).int()  # without a sync, so that a graph can capture it
