"""Server-sent events, and work that stops when its client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client closed its connection before it got the response."""


async def run_while_connected(receive: Receive, work: Awaitable[T], seconds: float | None = None) -> T:
    """Returns the result of `work`.

    Cancels it and raises ClientDisconnected if the client disconnects or `seconds` pass.
    """
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, disconnecting}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        # The work must free its resources before the caller continues.
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the JSON values of a generator, and always closes the generator.

    source: the generator that `values` reads. It is closed too, because a generator that never began closes nothing.
    seconds: time limit of the whole stream; a client that reads more slowly is disconnected.
    """

    media_type = "text/event-stream"

    def __init__(self, values: AsyncGenerator[Any, None], source: AsyncGenerator[Any, None], seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._values = values
        self._source = source
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._values):
            with suppress(ClientDisconnected):
                await run_while_connected(receive, self._send_all(send), self._seconds)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for value in self._values:
            data = json.dumps(value, separators=(",", ":"))
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
