"""Rows as the products of captured drafters read them: two tensors side by side; CUDA only."""

from __future__ import annotations

import torch

from specengine import _C


def join_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    dtype: torch.dtype,
    *,
    ids: torch.Tensor | None = None,
    above: torch.Tensor | None = None,
    norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    stream: torch.Tensor | None = None,
    norms_stream: bool = False,
    eps: float = 0.0,
) -> torch.Tensor:
    """Returns [M, C + D] of a dtype: rows of left [L, C] and of right [R, D] side by side.

    ids: int32 [M], rows of left, zeros for one that it lacks; None: as many neighbouring rows share one of left.
    above: int64 [M], rows of right; None: R is M.  norms: RMSNorm weights of both sides, and `eps` theirs.
    stream: float32 [M, D], written: the rows of right, normed if norms_stream.
    """
    first = right if above is None else above
    rows = len(first if ids is None else ids)
    out = torch.empty(rows, left.shape[1] + right.shape[1], dtype=dtype, device=right.device)
    _C.join_rows(left, ids, right, above, *norms, stream, out, norms_stream, eps)
    return out
