"""What the ranks say to each other, over a socket between the first one and each of the others; nothing listens."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

_HEADER = struct.Struct("<QQ")  # bytes that follow, and what they are
_MESSAGE, _ROWS = 0, 1


@dataclass(frozen=True)
class Start:
    """Which rank to be.  path: of the checkpoint."""

    rank: int
    size: int
    path: str
    dtype: str
    instruction_set: str


@dataclass(frozen=True)
class Ready:
    """The weights are read."""


@dataclass(frozen=True)
class Failed:
    """The last word of a rank."""

    why: str


@dataclass(frozen=True)
class Forward:
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


class Connection:
    """One end of a socket.  last_word: why the other end failed, as far as it said so.  silent: it did not answer.

    Raises ConnectionError where the other end is gone or has failed, BlockingIOError where it does not answer within
    the seconds of limit().
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket, self.last_word, self.silent = end, "", False

    def limit(self, seconds: float) -> None:
        # The kernel's own limit costs no call, and a program that was stopped and goes on has the whole time again.
        span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, side, span)

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """What framed() or framed_rows() gave."""
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            self.silent = True
            raise

    def receive(self) -> object:
        """A message."""
        length, kind = _HEADER.unpack(self._read(_HEADER.size))
        data = self._read(length)
        if kind != _MESSAGE:
            raise ConnectionError("rows came where a message was due")
        return self._heed(data)

    def receive_rows(self, rows: int, columns: int) -> torch.Tensor:
        """float32 [rows, columns]."""
        length, kind = _HEADER.unpack(self._read(_HEADER.size))
        data = self._read(length)
        if kind != _ROWS:
            self._heed(data)
            raise ConnectionError("a message came where rows were due")
        if length != 4 * rows * columns:
            raise ConnectionError(f"{length} bytes of rows, expected {4 * rows * columns}")
        return torch.frombuffer(data, dtype=torch.float32).view(rows, columns)

    def hear_out(self) -> None:
        """Reads to the end of what one has said who is gone: its last word may stand behind rows."""
        with contextlib.suppress(OSError):
            while True:
                length, kind = _HEADER.unpack(self._read(_HEADER.size))
                data = self._read(length)
                if kind == _MESSAGE:
                    self._heed(data)

    def _heed(self, data: bytearray) -> object:
        message = pickle.loads(data)
        if isinstance(message, Failed):
            self.last_word = message.why
            raise ConnectionError(message.why)
        return message

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                got = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                self.silent = True
                raise
            if not got:
                raise ConnectionError("the other end is gone")
            view = view[got:]
        return data


def framed(message: object) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data), _MESSAGE) + data


def framed_rows(x: torch.Tensor) -> bytes:
    return _HEADER.pack(x.nbytes, _ROWS) + x.numpy().tobytes()
