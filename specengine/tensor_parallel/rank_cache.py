"""The part of a cache that a rank from 1 on has: pages of keys and values, and recurrent states of a hybrid."""

from __future__ import annotations

import torch

from specengine._C import DeltaStates
from specengine.cache.page_pool import PagePool
from specengine.cache.state_memory import StateMemory
from specengine.models.config import ModelConfig
from specengine.ops import Ops
from specengine.ops.gated_delta.matrices import NO_STATES
from specengine.tensor_parallel.messages import (
    RELEASED,
    CompactStates,
    MoveStates,
    OpenCache,
    PassStates,
    ReleasePages,
)


class RankCache:
    """Follows the messages of rank 0 about one cache.  config: of this rank's heads."""

    def __init__(self, config: ModelConfig, message: OpenCache, device: torch.device, ops: Ops) -> None:
        shape = (config.attention_layers, config.num_kv_heads, config.head_dim)
        self.pages = PagePool(*shape, getattr(torch, message.dtype), device, message.pages)
        self._ops = ops
        self._memory = None
        if config.gated_delta is not None:
            self._memory = StateMemory(config.gated_delta, device, message.slots)
        self._last = NO_STATES  # of the last pass, with its records

    def release(self, message: ReleasePages) -> None:
        """Does this rank's part of a ReleasePages."""
        self.pages.release(message.pages)

    def compact(
        self, block_table: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, path_length: torch.Tensor
    ) -> None:
        """Moves accepted paths; see ops.compact_kv."""
        self._ops.compact_kv(self.pages.k, self.pages.v, block_table, lengths, path, path_length)

    def move_states(self, message: MoveStates) -> None:
        """Does this rank's part of a MoveStates."""
        memory = self._states()
        for to, source in message.moves:
            if source is None:
                memory.clear(to)
            elif source == RELEASED:
                memory.release([to])
            else:
                memory.copy(source, to)

    def compact_states(self, message: CompactStates) -> None:
        """Does this rank's part of a CompactStates."""
        row_start, path = torch.from_numpy(message.row_start), torch.from_numpy(message.path)
        self._states().replay(self._last, row_start, path, torch.from_numpy(message.path_length), self._ops)

    def of_pass(self, states: PassStates | None, rows: int) -> DeltaStates:
        """Returns what a pass of `rows` rows reads and writes."""
        if states is not None:
            self._last = self._states().of_pass(torch.from_numpy(states.slots), rows, states.final)
        return self._last

    def _states(self) -> StateMemory:
        assert self._memory is not None  # only a hybrid gets such messages
        return self._memory
