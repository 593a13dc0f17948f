"""Rows plus what a product made of them, as the next product of a drafter reads them."""

from __future__ import annotations

import torch

from specengine import _C
from specengine.utils.host_memory import is_host


def add_delta(
    x: torch.Tensor | None,
    delta: torch.Tensor,
    dtype: torch.dtype,
    *,
    total: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """Returns x + delta, or x + silu(delta), in a dtype.

    x, delta: float32 [M, C]; no x: zeros.  total: float32 [M, C], takes the unrounded sum; x and delta may be it.
    """
    if is_host(delta.device):
        out = torch.nn.functional.silu(delta) if silu else delta
        out = out if x is None else x + out
        if total is not None:
            total.copy_(out)
        return out.to(dtype)
    out = torch.empty_like(delta, dtype=dtype)
    _C.add_delta(x, delta, total, out, silu)
    return out


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns x [M, C] in a dtype; x itself where it has that."""
    if x.dtype == dtype:
        return x
    return add_delta(None, x.contiguous(), dtype) if x.dtype == torch.float32 else x.to(dtype)
