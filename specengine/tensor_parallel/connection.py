"""The socket between the first rank and another one. Both ends are inherited: no port listens."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct

import torch

from specengine.tensor_parallel.messages import HEADER, MESSAGE, ROWS, Failed


class Connection:
    """One end of a socket.

    failure: the reason in the Failed message of the other end; empty without one.  silent: the other end did not answer
    in time. Methods raise ConnectionError where the other end is closed or has failed, and BlockingIOError where it
    does not answer within the seconds of set_timeout().
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.failure = ""
        self.silent = False

    def set_timeout(self, seconds: float) -> None:
        """Limits the time of every later send and receive."""
        # The kernel's own limit costs no call, and starts anew when a stopped process continues.
        span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, side, span)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Sends the bytes that encode_message() or encode_rows() returned."""
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            self.silent = True
            raise

    def receive(self) -> object:
        """Receives a message."""
        length, kind = HEADER.unpack(self._read(HEADER.size))
        data = self._read(length)
        if kind != MESSAGE:
            raise ConnectionError("rows came where a message was due")
        return self._decoded(data)

    def receive_rows(self, rows: int, columns: int) -> torch.Tensor:
        """Receives float32 [rows, columns]."""
        length, kind = HEADER.unpack(self._read(HEADER.size))
        data = self._read(length)
        if kind != ROWS:
            self._decoded(data)
            raise ConnectionError("a message came where rows were due")
        if length != 4 * rows * columns:
            raise ConnectionError(f"{length} bytes of rows, expected {4 * rows * columns}")
        return torch.frombuffer(data, dtype=torch.float32).view(rows, columns)

    def find_failure(self) -> None:
        """Reads the rest of a closed connection: a Failed message may follow rows."""
        with contextlib.suppress(OSError):
            while True:
                length, kind = HEADER.unpack(self._read(HEADER.size))
                data = self._read(length)
                if kind == MESSAGE:
                    self._decoded(data)

    def _decoded(self, data: bytearray) -> object:
        message = pickle.loads(data)
        if isinstance(message, Failed):
            self.failure = message.reason
            raise ConnectionError(message.reason)
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
                raise ConnectionError("the other end is closed")
            view = view[got:]
        return data
