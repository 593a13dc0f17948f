"""A step of a gated recurrent unit along drafted paths, behind its two products; CUDA only.

Shapes: R rows, S states before them, G the size of a state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specengine import _C


class GruState(NamedTuple):
    """States [R, G]. exact: float32.  rounded: the same as the next product reads it."""

    exact: torch.Tensor
    rounded: torch.Tensor


def gru_step(
    read: torch.Tensor,
    kept: torch.Tensor | None,
    state: GruState | None,
    above: torch.Tensor | None,
    dtype: torch.dtype,
) -> GruState:
    """Returns the states behind the rows, as PyTorch's GRU computes them: reset, update and new lie side by side.

    read: float32 [R, 3G], made of the tokens.  kept: float32 [S, 3G], made of `state`; both None: zeros.
    above: int64 [R], the state that each row continues; None: that of its number.  dtype: of the rounded states.
    Raises ValueError for shapes that do not fit.
    """
    size = read.shape[1] // 3
    exact = torch.empty(len(read), size, device=read.device)
    rounded = exact if dtype == torch.float32 else torch.empty_like(exact, dtype=dtype)
    before = None if state is None else state.exact
    _C.gru_step(read, kept, before, above, exact, None if rounded is exact else rounded)
    return GruState(exact, rounded)
