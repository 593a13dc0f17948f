"""Low-rank adapters beside the weights: out += scale * B (A x), each row with the adapter of its request.

Shapes: M rows, K input columns, N output columns, B requests.
"""

from __future__ import annotations

import torch

from specengine import _C
from specengine.ops.lora.matrices import LoraProjection


def add_lora(
    x: torch.Tensor, projection: LoraProjection, row_start: torch.Tensor, adapters: torch.Tensor, out: torch.Tensor
) -> None:
    """out [M, N] += scale * B (A x) for x [M, K], float32; on CUDA x may be rounded.

    row_start: int32 [B + 1], the rows of each request.  adapters: int32 [B], -1: none; its rows stay as they are.
    A row's bits depend on the row and its adapter alone. On the CPU raises ValueError for an unknown adapter; on CUDA
    such a row stays as it is.
    """
    if projection.modules:
        floats = projection.native.workspace_floats(len(x))
        workspace = torch.empty(floats, dtype=torch.float32, device=x.device)
        _C.add_lora(x, projection.native, row_start, adapters, out, workspace)


def add_lora_reference(
    x: torch.Tensor, projection: LoraProjection, row_start: torch.Tensor, adapters: torch.Tensor, out: torch.Tensor
) -> None:
    counts = row_start.diff()
    of_row = adapters.repeat_interleave(counts)
    for module in projection.modules:
        for number, (rank, scale) in enumerate(zip(module.ranks.tolist(), module.scales.tolist(), strict=True)):
            rows = (of_row == number).nonzero().view(-1)
            if rank and len(rows):
                a = module.a[number].mT.flatten(0, 1)[:rank].float()
                b = module.b[number].mT.flatten(0, 1)[: module.rows, :rank].float()
                out[rows, module.first : module.first + module.rows] += scale * (x[rows].float() @ a.T @ b.T)
