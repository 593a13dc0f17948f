"""Answers that are sent as they come, as server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class Left(Exception):
    """The client is gone: nobody will read the answer."""


async def while_connected(receive: Receive, work: Awaitable[T], seconds: float | None = None) -> T:
    """What `work` gives; it is cancelled, and Left raised, if the client goes away or `seconds` are over."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Left
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        # What it holds must be given back before anybody counts on it.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """The JSON values of a generator, which is closed whatever becomes of the client.

    source: what it reads, closed too: a generator that never began closes nothing.
    seconds: that all of it may take; who reads no faster is cut off.
    """

    media_type = "text/event-stream"

    def __init__(self, values: AsyncGenerator[Any, None], source: AsyncGenerator[Any, None], seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._values, self._source, self._seconds = values, source, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._values):
            with suppress(Left):
                await while_connected(receive, self._send_all(send), self._seconds)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for value in self._values:
            data = json.dumps(value, separators=(",", ":"))
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
