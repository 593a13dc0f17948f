"""The grouped dynamic convolution of DFlash 2: it mixes a slot with those before it, around attention and MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specengine.ops.weight import Projection

Linear = Callable[[torch.Tensor, Projection], torch.Tensor]


@dataclass(frozen=True)
class Convolution:
    """base: float32 [2, taps, hidden], before and after the sublayer.  kernel: makes what a row adds to both.

    Its rows are ordered side, tap, group; `group` neighbouring channels share one.
    """

    base: torch.Tensor
    kernel: Projection
    group: int
    linear: Linear

    def at(self, normed: torch.Tensor, size: int) -> ConvolutionAt:
        """Returns the convolution whose kernel is made of a sublayer's input [B size, hidden]."""
        _, taps, hidden = self.base.shape
        change = self.linear(normed, self.kernel).view(-1, size, 2, taps, hidden // self.group, 1)
        groups = self.base.view(2, taps, -1, self.group)
        return ConvolutionAt((groups + change).flatten(-2))


@dataclass(frozen=True)
class ConvolutionAt:
    """The convolution of a block. kernels: float32 [B, size, 2, taps, hidden]; tap t reads the slot t before."""

    kernels: torch.Tensor

    def before(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns what the sublayer reads, of its input [B size, hidden]."""
        return self._mixed(rows, 0)

    def after(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns what joins the residual stream, of the sublayer's output [B size, hidden]."""
        return self._mixed(rows, 1)

    def _mixed(self, rows: torch.Tensor, side: int) -> torch.Tensor:
        batch, size, _, taps, hidden = self.kernels.shape
        blocks = rows.view(batch, size, hidden)
        out = self.kernels[:, :, side, 0] * blocks
        for tap in range(1, min(taps, size)):  # never across the start of a block
            out[:, tap:] += self.kernels[:, tap:, side, tap] * blocks[:, :-tap]
        return out.view(rows.shape)
