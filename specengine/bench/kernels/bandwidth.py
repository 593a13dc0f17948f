"""Memory bandwidth of a device, which times of kernels and cycles are compared with."""

from __future__ import annotations

import time
from functools import partial

import torch

from specengine.bench.kernels.timers import GraphTimer, medians


def bandwidth(device: torch.device) -> float:
    """Measures bytes per second between a device and its memory, with more bytes than caches hold.

    It is the best of five sums on a CPU, and the median of copies on a GPU, which count bytes read and written.
    """
    if device.type == "cuda":
        source = torch.randn(1 << 27, device=device)
        copies = GraphTimer([partial(torch.empty_like(source).copy_, source)] * 8)
        return 2 * source.nbytes / medians([copies], rounds=9)[0]
    data = torch.ones(1 << 26, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best
