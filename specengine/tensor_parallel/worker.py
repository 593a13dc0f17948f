"""The process of a rank from 1 on: it has one shard of a model and follows the messages of the first rank."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine import _C
from specengine.models.checkpoint import open_checkpoint
from specengine.models.checkpoint_base import CPU
from specengine.models.rope import RopeTables
from specengine.ops import native
from specengine.tensor_parallel.connection import Connection
from specengine.tensor_parallel.messages import (
    Compact,
    CompactStates,
    DropCaches,
    Failed,
    Forward,
    MoveStates,
    Ready,
    Resize,
    Start,
    encode_message,
    encode_rows,
)
from specengine.tensor_parallel.rank_cache import RankCache
from specengine.tensor_parallel.shard_decoder import shard_decoder
from specengine.tensor_parallel.shards import ShardBounds, ShardLoader


@dataclass
class _Rows:
    """The rows of a pass. tokens: only their number counts, because the pass reads embedded tokens."""

    tokens: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor | None


class Rank:
    """One rank's shard of the layers, and its part of every cache."""

    def __init__(self, start: Start, first: Connection) -> None:
        self._first = first
        _C.set_instruction_set(start.instruction_set)
        checkpoint = open_checkpoint(start.path)
        bounds = ShardBounds.of(checkpoint.config, start.size)
        self._config = bounds.config(start.rank, checkpoint.config)
        loader = ShardLoader(checkpoint, start.dtype, bounds, start.rank)
        layers = loader.layers()
        self._decoder = shard_decoder(native, self._gather, self._config, layers, loader.vector("model.norm.weight"))
        self._rope = RopeTables(checkpoint.config, CPU)
        self._caches: dict[int, RankCache] = {}

    def handle(self, message: object) -> None:
        """Does this rank's part of a message."""
        if isinstance(message, Forward):
            self._pass(message)
        elif isinstance(message, Compact):
            self._caches[message.cache].compact(message)
        elif isinstance(message, MoveStates):
            self._caches[message.cache].move_states(message)
        elif isinstance(message, CompactStates):
            self._caches[message.cache].compact_states(message)
        elif isinstance(message, Resize):
            if message.cache not in self._caches:
                self._caches[message.cache] = RankCache(self._config, message.dtype)
            self._caches[message.cache].resize(message)
        elif isinstance(message, DropCaches):
            for number in message.caches:
                self._caches.pop(number, None)
        else:
            raise TypeError(f"message: {type(message).__name__} is no message to a rank")

    def _gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        self._first.send(encode_rows(x))
        return self._first.receive_rows(len(x), sum(widths))

    def _pass(self, message: Forward) -> None:
        self._rope.ensure(message.positions)
        cache = self._caches[message.cache]
        depths = torch.from_numpy(message.depths)
        ancestors = None if message.ancestors is None else torch.from_numpy(message.ancestors)
        rows = _Rows(torch.zeros_like(depths), depths, torch.from_numpy(message.row_start), ancestors)
        block_table = torch.from_numpy(message.block_table)
        lengths = torch.from_numpy(message.lengths)
        inputs = torch.from_numpy(message.inputs)
        place = (cache.pages.k, cache.pages.v, block_table, lengths)
        states = cache.of_pass(message.states, len(depths))
        self._decoder(rows, *place, *self._rope.cos_sin, inputs=inputs, states=states)


def main(descriptor: int, first_process: int) -> None:
    """Serves over an inherited socket until its other end is closed, or the process of the first rank ends."""
    threading.Thread(target=_exit_with, args=(first_process,), daemon=True).start()
    first = Connection(socket.socket(fileno=descriptor))
    status = 1
    try:
        start = first.receive()
        assert isinstance(start, Start)
        rank = Rank(start, first)
        first.send(encode_message(Ready()))
        while True:
            rank.handle(first.receive())
    except ConnectionError:  # the first rank ended or closed the connection
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            first.send(encode_message(Failed(f"{type(error).__name__}: {error}")))
    finally:
        os._exit(status)  # an orderly exit takes a second with PyTorch loaded


def _exit_with(process: int) -> None:
    # The socket is not enough: only a read sees that it is closed, and a fork of the first rank may keep it open.
    while os.getppid() == process:
        time.sleep(1)
    os._exit(0)
