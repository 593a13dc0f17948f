"""A process that has one rank's part of a model and does what the first rank says; it decides nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

import torch

from specengine import _C
from specengine.models.checkpoint import open_checkpoint
from specengine.models.checkpoint_base import CPU
from specengine.models.rope import RopeTables
from specengine.ops import native
from specengine.page_pool import PagePool
from specengine.parallel.exchange import Exchange
from specengine.parallel.layers import part_decoder
from specengine.parallel.messages import Compact, Failed, Forget, Pass, Ready, Resize, Start, framed, receive
from specengine.parallel.shards import Parts, ShardLoader

# Only the first rank loses patience: it ends the others, and when it goes they see that.
_PATIENCE = 24 * 3600.0


@dataclass
class _Rows:
    """tokens: only their number counts, as the embedded ones are given."""

    tokens: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor | None


class Rank:
    """One rank's layers and its part of every cache."""

    def __init__(self, start: Start) -> None:
        _C.set_instruction_set(start.instruction_set)
        checkpoint = open_checkpoint(start.path)
        parts = Parts.of(checkpoint.config, start.size)
        self._config = parts.config(start.rank, checkpoint.config)
        loader = ShardLoader(checkpoint, start.dtype, CPU, native, parts, start.rank)
        self._layers = [loader.layer(i) for i in range(self._config.num_layers)]
        self._final_norm = loader.vector("model.norm.weight")
        self._rope = RopeTables(checkpoint.config, CPU)
        self._caches: dict[int, PagePool] = {}

    def meet(self, exchange: Exchange) -> None:
        """The others."""
        self._decoder = part_decoder(native, exchange.gather, self._config, self._layers, self._final_norm)

    def obey(self, message: object) -> None:
        if isinstance(message, Pass):
            self._pass(message)
        elif isinstance(message, Compact):
            cache = self._caches[message.cache]
            columns = (message.block_table, message.lengths, message.path, message.path_length)
            native.compact_kv(cache.k, cache.v, *map(torch.from_numpy, columns))
        elif isinstance(message, Resize):
            cache = self._caches.get(message.cache) or self._new_cache(message.dtype)
            cache.k, cache.v = cache.copied(message.pages, message.kept)
            self._caches[message.cache] = cache
        elif isinstance(message, Forget):
            for number in message.caches:
                self._caches.pop(number, None)
        else:
            raise TypeError(f"message: {type(message).__name__} is none for a rank")

    def _new_cache(self, dtype: str) -> PagePool:
        c = self._config
        return PagePool(c.num_layers, c.num_kv_heads, c.head_dim, getattr(torch, dtype), CPU, 0)

    def _pass(self, message: Pass) -> None:
        self._rope.ensure(message.positions)
        cache, depths = self._caches[message.cache], torch.from_numpy(message.depths)
        ancestors = None if message.ancestors is None else torch.from_numpy(message.ancestors)
        rows = _Rows(torch.zeros_like(depths), depths, torch.from_numpy(message.row_start), ancestors)
        block_table, lengths = torch.from_numpy(message.block_table), torch.from_numpy(message.lengths)
        inputs = torch.from_numpy(message.inputs)
        self._decoder(rows, cache.k, cache.v, block_table, lengths, *self._rope.cos_sin, inputs=inputs)


def main(handle: int) -> None:
    """Serves over the socket of this number until its other end is closed, which is so when that process ends."""
    connection = socket.socket(fileno=handle)
    status = 0
    try:
        start = receive(connection)
        if isinstance(start, Start):
            rank = Rank(start)
            connection.sendall(framed(Ready()))
            rank.meet(Exchange(start.store, start.rank, start.size, _PATIENCE))
            while (message := receive(connection)) is not None:
                rank.obey(message)
    except ConnectionError:  # the first rank is gone, or another one, which is not this one's failure
        pass
    except BaseException as error:
        status = 1
        with contextlib.suppress(OSError):
            connection.sendall(framed(Failed(f"{type(error).__name__}: {error}")))
    os._exit(status)  # gloo's threads would abort an ordinary end
