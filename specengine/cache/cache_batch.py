"""The view of the cache that a batch gives to the ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specengine.cache.state_pool import StateBatch
from specengine.utils.host_memory import is_host


@dataclass
class CacheBatch:
    """Shows the ops the cache of a batch.  block_table: int32 [B, max_pages].  lengths: int32 [B], cached tokens.

    adapters: int32 [B], the adapter with which each request's keys and values are made, -1: none; None: of no request.
    states: of a hybrid model.
    """

    block_table: torch.Tensor
    lengths: torch.Tensor
    adapters: torch.Tensor | None = None
    states: StateBatch | None = None

    def __post_init__(self) -> None:
        # Lengths on the host, None where only the device knows them. They share memory with lengths on the CPU, where
        # numpy adds faster than a tensor.
        self.host: np.ndarray | None = None

    def first(self, size: int) -> CacheBatch:
        """Returns the view of the first `size` requests of a batch on a device."""
        adapters = None if self.adapters is None else self.adapters[:size]
        states = None if self.states is None else self.states.first(size)
        return CacheBatch(self.block_table[:size], self.lengths[:size], adapters, states)

    def advance(self, counts: torch.Tensor) -> None:
        """Adds newly cached tokens.  counts: int32 [B]."""
        if self.host is None or not is_host(self.lengths.device):
            self.lengths.add_(counts.to(self.lengths.device))
            self.host = None
            return
        for b, count in enumerate(counts.tolist()):
            self.host[b] += count
