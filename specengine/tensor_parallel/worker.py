"""The process of a rank from 1 on: it has one shard of a model and follows the messages of the first rank."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import torch

from specengine import _C
from specengine.models.checkpoint import open_checkpoint
from specengine.models.rope import RopeTables
from specengine.ops import ops_for
from specengine.tensor_parallel.connection import Connection
from specengine.tensor_parallel.device.follower import DeviceFollower
from specengine.tensor_parallel.host_follower import Follower, Handlers, HostFollower
from specengine.tensor_parallel.messages import (
    CompactStates,
    DropCaches,
    Failed,
    MoveStates,
    OpenCache,
    Ready,
    ReleasePages,
    Start,
    encode_message,
)
from specengine.tensor_parallel.rank_cache import RankCache
from specengine.tensor_parallel.shard_decoder import shard_decoder
from specengine.tensor_parallel.shards import ShardBounds, ShardLoader
from specengine.utils.cuda_graphs import device_turn


class Rank:
    """One rank's shard of the layers, and its part of every cache."""

    def __init__(self, start: Start, first: Connection) -> None:
        _C.set_instruction_set(start.instruction_set)
        self.device = torch.device(start.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._ops = ops_for(self.device, start.strict)
        checkpoint = open_checkpoint(start.path)
        bounds = ShardBounds.of(checkpoint.config, start.size)
        self._config = bounds.config(start.rank, checkpoint.config)
        loader = ShardLoader(checkpoint, start.dtype, bounds, start.rank, self.device, self._ops)
        layers, rope = loader.layers(), RopeTables(checkpoint.config, self.device)
        if self._ops.tune is not None:
            for projection in (each for layer in layers for each in layer.projections):
                self._ops.tune(projection)
        self._caches: dict[int, RankCache] = {}
        if self._ops.on_device:
            place, hidden = (start.rank, start.size, self.device), self._config.hidden_size
            self._follower: Follower = DeviceFollower(place, hidden, first.receive, self.handle, rope, self._caches)
        else:
            self._follower = HostFollower(first, rope, self._caches)
        norm, follower = loader.vector("model.norm.weight"), self._follower
        follower.decoder = shard_decoder(self._ops, follower.gather, follower.add, self._config, layers, norm)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # passes run on another stream than wrote the weights
        self._handlers: Handlers = {
            OpenCache: self._open_cache,
            ReleasePages: lambda message: self._caches[message.cache].release(message),
            DropCaches: self._drop_caches,
            MoveStates: lambda message: self._caches[message.cache].move_states(message),
            CompactStates: lambda message: self._caches[message.cache].compact_states(message),
            **follower.handlers,
        }

    def handle(self, message: object) -> None:
        """Does this rank's part of a message."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise TypeError(f"message: {type(message).__name__} is no message to a rank")
        handler(message)

    def _open_cache(self, message: OpenCache) -> None:
        self._caches[message.cache] = RankCache(self._config, message, self.device, self._ops)

    def _drop_caches(self, message: DropCaches) -> None:
        for number in message.caches:
            self._caches.pop(number, None)


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
            message = first.receive()
            with device_turn(rank.device):
                rank.handle(message)
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
