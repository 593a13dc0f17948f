"""What a rank from 1 on does with the passes of the CPU, whose rows come with the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from specengine.models.rope import RopeTables
from specengine.ops.decoder import Pass
from specengine.tensor_parallel.connection import Connection
from specengine.tensor_parallel.messages import Compact, Forward, encode_rows
from specengine.tensor_parallel.passes import Add
from specengine.tensor_parallel.rank_cache import RankCache
from specengine.tensor_parallel.rank_rows import RankRows

Handlers: TypeAlias = Mapping[type, Callable[[Any], None]]


class Follower(Protocol):
    """Follows the first rank's passes.  decoder: of this rank's layers, set before the first message.

    gather, add: see passes.Passes.
    """

    decoder: Pass

    @property
    def add(self) -> Add | None: ...

    @property
    def handlers(self) -> Handlers:
        """What it does with each kind of message."""
        ...

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor: ...


class HostFollower:
    """Follows passes of the CPU.  caches: by number."""

    add = None
    decoder: Pass

    def __init__(self, first: Connection, rope: RopeTables, caches: Mapping[int, RankCache]) -> None:
        self._first, self._rope, self._caches = first, rope, caches

    @property
    def handlers(self) -> Handlers:
        return {Forward: self._forward, Compact: self._compact}

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        self._first.send(encode_rows(x))
        return self._first.receive_rows(len(x), sum(widths))

    def _forward(self, message: Forward) -> None:
        self._rope.ensure(message.positions)
        cache = self._caches[message.cache]
        depths = torch.from_numpy(message.depths)
        ancestors = None if message.ancestors is None else torch.from_numpy(message.ancestors)
        rows = RankRows(torch.zeros_like(depths), depths, torch.from_numpy(message.row_start), ancestors)
        block_table = torch.from_numpy(message.block_table)
        lengths = torch.from_numpy(message.lengths)
        inputs = torch.from_numpy(message.inputs)
        place = (cache.pages.k, cache.pages.v, block_table, lengths)
        states = cache.of_pass(message.states, len(depths))
        self.decoder(rows, *place, *self._rope.cos_sin, inputs=inputs, states=states)

    def _compact(self, message: Compact) -> None:
        columns = (message.block_table, message.lengths, message.path, message.path_length)
        self._caches[message.cache].compact(*map(torch.from_numpy, columns))
