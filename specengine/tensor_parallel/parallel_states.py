"""The first rank's part of recurrent states, which tells the other ranks what happens to slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine._C import DeltaStates
from specengine.cache.state_memory import StateMemory
from specengine.models.checkpoint_base import CPU
from specengine.ops import Ops
from specengine.tensor_parallel.delta_shards import DeltaShards
from specengine.tensor_parallel.group import Group
from specengine.tensor_parallel.messages import RELEASED, CompactStates, MoveStates


class ParallelStates(StateMemory):
    """Holds the states of rank 0's heads. What it does with slots, the other ranks do before their next pass or replay.

    Only passes and replays read states, so nothing is sent when a request starts: no error of another rank can come
    there.  cache: the number of its cache.  slots: see StateMemory.
    """

    def __init__(self, group: Group, shards: DeltaShards, cache: int, slots: int | None) -> None:
        super().__init__(shards.config(0), CPU, slots)
        self._group, self._cache, self._whole = group, cache, shards.whole
        self._moves: list[tuple[int, int | None]] = []  # see MoveStates

    @property
    def slot_bytes(self) -> int:
        """Bytes of one text's states in all ranks together."""
        return 4 * len(self._whole.layers) * self._whole.state_floats

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self._moves.append((slot, None))

    def copy(self, slot: int, to: int) -> None:
        super().copy(slot, to)
        self._moves.append((to, slot))

    def release(self, slots: Sequence[int]) -> None:
        super().release(slots)
        self._moves += [(slot, RELEASED) for slot in slots]

    def replay(
        self, states: DeltaStates, row_start: torch.Tensor, path: torch.Tensor, path_length: torch.Tensor, ops: Ops
    ) -> None:
        self.send_moves()
        columns = (row_start.numpy(), path.numpy(), path_length.numpy())
        with self._group.broadcast(CompactStates(self._cache, *columns)):
            super().replay(states, row_start, path, path_length, ops)

    def send_moves(self) -> None:
        """Sends the other ranks what happened to slots since the last call. Raises RankFailed."""
        if self._moves:
            with self._group.broadcast(MoveStates(self._cache, tuple(self._moves))):
                self._moves.clear()
