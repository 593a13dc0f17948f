"""The matrices of an adapter, as its file has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoraMatrices:
    """One adapted matrix: y += scale * B (A x).  a: [r, K].  b: [N, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
