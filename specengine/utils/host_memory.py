"""Which tensors lie where numpy reads them: what the host computes with numpy there, torch computes elsewhere."""

from __future__ import annotations

import torch

HOST_TYPES = frozenset({"cpu"})  # of devices; simulated runs empty it, and so take the branches of a GPU


def is_host(device: torch.device) -> bool:
    """Returns whether numpy can read a device's tensors in place."""
    return device.type in HOST_TYPES
