"""The part of a cache that a rank from 1 on has: pages of keys and values, and recurrent states of a hybrid."""

from __future__ import annotations

import torch

from specengine._C import DeltaStates
from specengine.cache.page_pool import PagePool
from specengine.cache.state_memory import StateMemory
from specengine.models.config import ModelConfig
from specengine.ops import Ops
from specengine.ops.gated_delta.matrices import NO_STATES
from specengine.tensor_parallel.messages import CompactStates, MoveStates, PassStates, Resize


class RankCache:
    """Follows the messages of rank 0 about one cache.  config: of this rank's heads.  dtype: of keys and values."""

    def __init__(self, config: ModelConfig, dtype: str, device: torch.device, ops: Ops) -> None:
        shape = (config.attention_layers, config.num_kv_heads, config.head_dim)
        self.pages = PagePool(*shape, getattr(torch, dtype), device, 0)
        self._ops = ops
        self._memory = None if config.gated_delta is None else StateMemory(config.gated_delta, device)
        self._last = NO_STATES  # of the last pass, with its records

    def resize(self, message: Resize) -> None:
        """Does this rank's part of a Resize."""
        self.pages.k, self.pages.v = self.pages.copied(message.pages, message.kept)

    def compact(
        self, block_table: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, path_length: torch.Tensor
    ) -> None:
        """Moves accepted paths; see ops.compact_kv."""
        self._ops.compact_kv(self.pages.k, self.pages.v, block_table, lengths, path, path_length)

    def move_states(self, message: MoveStates) -> None:
        """Does this rank's part of a MoveStates."""
        memory = self._states()
        if message.slots > memory.slots:
            memory.resize(message.slots)
        for to, source in message.moves:
            if source is None:
                memory.clear(to)
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
