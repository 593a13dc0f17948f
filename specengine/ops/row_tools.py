"""Small operations on rows of logits and hidden states, for drafters that run between two cycles.

On the CPU numpy computes them in the calling thread. torch would wake a second pool of threads, which keep spinning on
the cores that the next pass needs; that made a draft several times slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specengine import _C
from specengine.utils.host_memory import is_host


def likeliest(logits: torch.Tensor, count: int) -> list[list[int]]:
    """The `count` most likely tokens of each row [R, V], of equals the lower one first; topk does not promise that."""
    left = _array(logits)
    if count > 1:
        left = left.copy() if isinstance(left, np.ndarray) else left.clone()
    columns = []
    for _ in range(count):
        best = left.argmax(-1)
        columns.append(best.tolist())
        if count > 1:
            left[range(len(left)), best] = float("-inf")
    return [list(row) for row in zip(*columns, strict=True)]


def confidence(logits: torch.Tensor) -> list[float]:
    """The probability of each row's most likely token; logits: float32 [R, V]."""
    rows = _array(logits)
    if isinstance(rows, np.ndarray):
        return (1 / np.exp(rows - rows.max(axis=-1, keepdims=True)).sum(axis=-1)).tolist()
    return (rows.amax(-1) - rows.logsumexp(-1)).exp().tolist()


def take_rows(
    rows: torch.Tensor, picked: Sequence[int] | torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """rows[picked], in memory of its own.

    rows: of floats, on a device a multiple of 8 each where a tensor picks.  picked: a tensor is int32 or int64.
    dtype: to which a device rounds them; None: that of rows.
    """
    array = _array(rows)
    if isinstance(array, np.ndarray):
        places = _array(picked) if isinstance(picked, torch.Tensor) else np.array(picked, dtype=np.intp)
        return torch.from_numpy(array.take(places, axis=0))
    if not isinstance(picked, torch.Tensor):
        return array[list(picked)]
    out = torch.empty(len(picked), *rows.shape[1:], dtype=dtype or rows.dtype, device=rows.device)
    _C.gather_rows(rows.contiguous().flatten(1), picked, out.flatten(1))
    return out


class FixedRows:
    """Takes rows whose numbers the host knows; makes them once on a device, since captured graphs hold on to them."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], torch.Tensor] = {}

    def take(self, rows: torch.Tensor, picked: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """As take_rows."""
        if is_host(rows.device):
            return take_rows(rows, picked)
        key = tuple(picked)
        if key not in self._made:
            self._made[key] = torch.tensor(key, dtype=torch.int32, device=rows.device)
        return take_rows(rows, self._made[key], dtype)


def divided(rows: torch.Tensor, divisor: float) -> torch.Tensor:
    """rows / divisor, in memory of its own."""
    array = _array(rows)
    return torch.from_numpy(array / np.float32(divisor)) if isinstance(array, np.ndarray) else array / divisor


def scaled(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """rows * factor, in memory of its own."""
    array = _array(rows)
    return torch.from_numpy(array * np.float32(factor)) if isinstance(array, np.ndarray) else array * factor


def add_rows(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """rows + others, in memory of its own; both are [R, N]."""
    if is_host(rows.device):
        return torch.from_numpy(rows.numpy() + others.numpy())
    return rows + others


def stack_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all rows; parts: [R_i, V] each, at least one."""
    return _joined(parts, 0)


def join_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of rows side by side; parts: [R, V_i] each, at least one."""
    return _joined(parts, 1)


def _joined(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    if is_host(parts[0].device):
        return torch.from_numpy(np.concatenate([part.numpy() for part in parts], axis=axis))
    return torch.cat(list(parts), dim=axis)


def zero_rows(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Zeros int32 [rows, columns]."""
    if is_host(device):
        return torch.from_numpy(np.zeros((rows, columns), dtype=np.int32))
    return torch.zeros(rows, columns, dtype=torch.int32, device=device)


def _array(tensor: torch.Tensor) -> np.ndarray | torch.Tensor:
    return tensor.numpy() if is_host(tensor.device) else tensor
