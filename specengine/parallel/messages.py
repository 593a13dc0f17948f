"""What the first rank tells the others, and the few words they say, over a socket that only they have."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Start:
    """Which rank to be.  path: of the checkpoint.  store: a file through which the ranks find each other."""

    rank: int
    size: int
    path: str
    dtype: str
    store: str
    instruction_set: str


@dataclass(frozen=True)
class Ready:
    """The weights are read."""


@dataclass(frozen=True)
class Failed:
    """The last word of a rank."""

    why: str


@dataclass(frozen=True)
class Pass:
    """A pass of the layers over rows of a TreeBatch.

    inputs: float32 [M, hidden], the embedded tokens.  ancestors: None for chains.  positions: that the rotary tables
    must have.
    """

    cache: int
    inputs: np.ndarray
    depths: np.ndarray
    row_start: np.ndarray
    ancestors: np.ndarray | None
    block_table: np.ndarray
    lengths: np.ndarray
    positions: int


@dataclass(frozen=True)
class Compact:
    """The accepted paths of a batch."""

    cache: int
    block_table: np.ndarray
    lengths: np.ndarray
    path: np.ndarray
    path_length: np.ndarray


@dataclass(frozen=True)
class Resize:
    """A cache has so many pages from now on; kept: the new number of each page that keeps what it holds."""

    cache: int
    pages: int
    kept: Mapping[int, int]
    dtype: str


@dataclass(frozen=True)
class Forget:
    """Caches that nobody uses any more."""

    caches: tuple[int, ...]


def framed(message: object) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive(connection: socket.socket) -> object | None:
    """The next message; None where the other end is gone."""
    header = _exactly(connection, _LENGTH.size)
    data = header and _exactly(connection, *_LENGTH.unpack(header))
    return pickle.loads(data) if data else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            return b""
        view = view[got:]
    return bytes(data)
