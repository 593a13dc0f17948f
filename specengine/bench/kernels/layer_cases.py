"""Cases of kernels between linear layers: normalisation and activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specengine import ops
from specengine.bench.kernels.case import Case, returning
from specengine.bench.kernels.shapes import Kernels, Shapes


def rms_norm_case(s: Shapes, device: torch.device, kernels: Kernels, rows: int) -> Case:
    """Returns the case of adding to the residual and normalising it."""
    residual, delta = (torch.randn(rows, s.hidden, device=device) for _ in range(2))
    weight = torch.rand(s.hidden, device=device)
    out = torch.empty(rows, s.hidden, dtype=kernels.rows, device=device)
    other = residual.clone()

    def torch_norm() -> torch.Tensor:
        return F.rms_norm(other.add_(delta), (s.hidden,), weight, 1e-5).to(out.dtype)

    nbytes = rows * s.hidden * (4 + 4 + 4) + out.nbytes + 4 * s.hidden
    ours = returning(out, ops.layer.rms_norm, residual, delta, weight, out, 1e-5)
    return Case("rms_norm", f"M={rows}", nbytes, {"": [ours]}, [torch_norm])


def silu_mul_case(s: Shapes, device: torch.device, kernels: Kernels, rows: int) -> Case:
    """Returns the case of the activation of an MLP."""
    x = torch.randn(rows, 2 * s.intermediate, device=device)
    out = torch.empty(rows, s.intermediate, dtype=kernels.rows, device=device)
    gate, up = x.chunk(2, dim=1)
    ours = returning(out, ops.layer.silu_mul, x, out)
    nbytes = x.nbytes + out.nbytes
    return Case("silu_mul", f"M={rows}", nbytes, {"": [ours]}, [lambda: (F.silu(gate) * up).to(out.dtype)])
