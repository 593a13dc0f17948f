"""Ops on CUDA that do the work of two, in one launch with the bits of the two.

Shapes: M rows, C input columns, N output columns; H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from specengine import _C
from specengine._C import KVCacheView, RotatedRows
from specengine.ops.coded.weight import FORMS
from specengine.ops.layer import Kept
from specengine.ops.linear import LIBRARY
from specengine.ops.weight import Projection, Weight


class FusionChooser(Protocol):
    """Chooses how to multiply where our kernel saves a launch; see autotune.LinearChoices."""

    def choose_fused(self, weight: torch.Tensor, rows: int) -> int:
        """Returns the variant of the kernel, or LIBRARY where both launches are faster than it."""
        ...


class FusedOps:
    """The fused ops of a device. Each writes nothing and returns false where two launches are wanted."""

    def __init__(self, choices: FusionChooser, arrived: torch.Tensor) -> None:
        """arrived: tree_attention.arrival_counters, which all launches share."""
        self._choices = choices
        self._arrived = arrived

    def gather_norm(
        self,
        weight: Weight,
        ids: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        kept: Kept | None = None,
    ) -> bool:
        """residual[M, C] = rows `ids` of an embedding, see gather_rows; out[M, C] = their norm, see layer.rms_norm."""
        if weight.format in FORMS or residual.shape[1] % 4 != 0:
            return False
        layers, place = kept or (None, 0)
        _C.gather_norm(weight.data, ids, residual, norm, out, layers, eps, place)
        return True

    def silu(self, x: torch.Tensor, layer: Projection, out: torch.Tensor) -> bool:
        """out[M, I] = silu(gate) * up of linear(x) = [gate | up], rounded to the weight's dtype."""
        weight, variant = layer.weights[0].data, self._variant(x, layer)
        if variant == LIBRARY or out.dtype != weight.dtype:
            return False
        _C.linear_silu(x, weight, layer.bias, out, variant)
        return True

    def norm(
        self,
        x: torch.Tensor,
        layer: Projection,
        residual: torch.Tensor,
        norm: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        kept: Kept | None = None,
    ) -> bool:
        """residual[M, N] += linear(x); out[M, N] = its norm, see layer.rms_norm."""
        weight, variant = layer.weights[0].data, self._variant(x, layer)
        if variant == LIBRARY or out.dtype not in (torch.float32, weight.dtype) or len(weight) % 4 != 0:
            return False
        layers, place = kept or (None, 0)
        _C.linear_norm(x, weight, layer.bias, residual, norm, out, layers, self._arrived, eps, place, variant)
        return True

    def rope(
        self,
        x: torch.Tensor,
        layer: Projection,
        rows: RotatedRows,
        cache: KVCacheView,
        q: torch.Tensor,
        eps: float,
        qkv: torch.Tensor,
    ) -> bool:
        """qkv = linear(x); q and the cache as layer.rope_cache writes them."""
        weight, variant, dim = layer.weights[0].data, self._variant(x, layer), cache.k_cache.shape[-1]
        if variant == LIBRARY or cache.k_cache.dtype != weight.dtype or dim % _block_rows(variant) != 0:
            return False
        if any(norm is not None and len(norm) != dim for norm in (rows.q_norm, rows.k_norm)):
            return False  # one norm of all heads
        _C.linear_rope(x, weight, layer.bias, qkv, rows, cache, q, self._arrived, eps, variant)
        return True

    def _variant(self, x: torch.Tensor, layer: Projection) -> int:
        (weight, *others) = layer.weights
        fits = len(x) <= _C.MOST_FUSED_ROWS and not others and layer.columns is None and weight.format not in FORMS
        fits = fits and not layer.crosses_ranks
        if not fits or x.dtype != weight.data.dtype:
            return LIBRARY
        return self._choices.choose_fused(weight.data, len(x))


def _block_rows(variant: int) -> int:
    return _C.LINEAR_VARIANTS[max(variant, 1) - 1][0]
