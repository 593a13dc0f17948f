"""Linear layers over weights prepared once at load.

Shapes: M rows, C input columns, N output columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specengine import _C


def empty_weight(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for a weight [N, C] in the packed form [ceil(N / 16), C, 16], to be filled by pack_linear."""
    panels = -(-rows // _C.PANEL)
    weight = torch.empty(panels, columns, _C.PANEL, dtype=dtype, device=device)
    weight[-1:].zero_()  # rows past N in the last panel are multiplied too
    return weight


def pack_linear(rows: torch.Tensor, packed: torch.Tensor, first: int) -> None:
    """Writes weight rows [R, C] (float32, bfloat16, float16) to rows [first, first + R) of a packed weight."""
    _C.pack_linear(rows, packed, first)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out[M, N] = x[M, C] @ weight^T + bias, all float32 but the weight; a row's bits do not depend on M."""
    _C.linear(x, weight, bias, out)


def gather_rows(weight: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """out[M, C] = rows `ids` (int32 [M]) of a packed weight. Raises ValueError for an id out of range."""
    _C.gather_rows(weight, ids, out)


def empty_weight_reference(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The reference keeps a weight as it is: [N, C]."""
    return torch.empty(rows, columns, dtype=dtype, device=device)


def pack_linear_reference(rows: torch.Tensor, packed: torch.Tensor, first: int) -> None:
    packed[first : first + rows.shape[0]] = rows.to(packed.dtype)


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    out.copy_(F.linear(x.to(weight.dtype), weight))
    if bias is not None:
        out.add_(bias)


def gather_rows_reference(weight: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(weight[ids.long()])
