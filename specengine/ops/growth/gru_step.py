"""A step of a gated recurrent unit along drafted paths, after its two products.

Shapes: R rows, S states before them, G the size of a state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specengine import _C
from specengine.ops.row_tools import take_rows
from specengine.utils.host_memory import is_host


class GruState(NamedTuple):
    """States [R, G]. exact: float32.  rounded: the same as the next product reads it."""

    exact: torch.Tensor
    rounded: torch.Tensor


def gru_step(
    read: torch.Tensor,
    kept: torch.Tensor | None,
    states: torch.Tensor | None,
    above: torch.Tensor | None,
    dtype: torch.dtype,
) -> GruState:
    """Returns the states behind the rows, as PyTorch's GRU computes them: reset, update and new lie side by side.

    read: float32 [R, 3G], made of the tokens.  states: float32 [S, G], those before.  kept: float32 [S, 3G], made of
    these; both None: zeros.  above: int64 [R], the state that each row continues; None: that of its number.
    dtype: of the rounded states.
    Raises ValueError for shapes that do not fit.
    """
    if is_host(read.device):
        exact = _on_host(read, kept, states, above)
        return GruState(exact, exact.to(dtype))
    size = read.shape[1] // 3
    exact = torch.empty(len(read), size, device=read.device)
    rounded = exact if dtype == torch.float32 else torch.empty_like(exact, dtype=dtype)
    _C.gru_step(read, kept, states, above, exact, None if rounded is exact else rounded)
    return GruState(exact, rounded)


def _on_host(
    read: torch.Tensor, kept: torch.Tensor | None, states: torch.Tensor | None, above: torch.Tensor | None
) -> torch.Tensor:
    reset, update, new = read.chunk(3, -1)
    if kept is None or states is None:
        return (1 - torch.sigmoid(update)) * torch.tanh(new)
    if above is not None:
        kept, states = take_rows(kept, above), take_rows(states, above)
    kept_reset, kept_update, kept_new = kept.chunk(3, -1)
    update = torch.sigmoid(update + kept_update)
    new = torch.tanh(new + torch.sigmoid(reset + kept_reset) * kept_new)
    return (1 - update) * new + update * states
