"""Which tensors lie where numpy reads them: what the host computes with numpy there, torch computes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

HOST_TYPES = frozenset({"cpu"})  # of devices; simulated runs empty it, and so take the branches of a GPU


def is_host(device: torch.device) -> bool:
    """Returns whether numpy can read a device's tensors in place."""
    return device.type in HOST_TYPES


def put_ints(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Returns int32 arrays as tensors; they reach a device in one copy, which waits for no earlier work there.

    They are pinned: CUDA may wait for a stream before it copies other memory. torch keeps them until the copy is over.
    """
    if is_host(device):
        return [torch.from_numpy(array) for array in arrays]
    sizes = [array.size for array in arrays]
    together = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate([array.reshape(-1) for array in arrays], out=together.numpy())
    parts = together.to(device, non_blocking=True).split(sizes)
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
