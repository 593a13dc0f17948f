"""Connections: how long they may wait for a request, and how a shutdown cuts them."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # in which the head of a request must arrive


class Connection(H11Protocol):
    """Closes a connection that has begun and brings no whole head of a request in time.

    uvicorn limits the time between two requests only, and any byte ends that limit.
    """

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._limit_waiting()

    def data_received(self, data: bytes) -> None:
        """Begins to wait for a request, or ends to."""
        super().data_received(data)
        self._limit_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing any more."""
        super().connection_lost(exc)
        self._stop_waiting()

    def cut(self) -> None:
        """Ends the connection and its request, as if the client had gone."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # it writes nothing more
        if self.transport.get_write_buffer_size():  # the client does not read
            self.transport.abort()
        else:
            self.transport.close()

    def _limit_waiting(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
