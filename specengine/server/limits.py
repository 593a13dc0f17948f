"""What a request must pass before it is read: host, key, kind, size, a free place."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specengine.engine.prometheus import Family, Sample
from specengine.server.errors import ApiError, refused
from specengine.server.settings import Settings

BODY_SECONDS = 30.0  # that a body may take to arrive
OPEN = ("/", "/health")  # no key is asked for
ROUTES = (*OPEN, "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions")


class Limits:
    """The application behind its limits; counts what passes.

    A body is read as a whole before it takes a place, so a slow sender holds up nobody.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._key = _digest(f"Bearer {settings.api_key}".encode()) if settings.api_key else None
        self._answers: Counter[tuple[str, int]] = Counter()
        self.streams = 0  # requests being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._counted(_route(scope), send)
        try:
            self._admit(scope)
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            receive = _replayed(await self._body(scope, receive), receive)
            with self._place():
                await self._app(scope, receive, send)
        except ApiError as error:
            await error.response(scope, receive, send)

    def families(self) -> Iterable[Family]:
        """For Prometheus."""
        answers: list[Sample] = [
            ("", {"path": path, "status": status}, count) for (path, status), count in self._answers.items()
        ]
        yield "http_responses_total", "counter", "Responses that began, by path and status.", answers
        yield "http_streams", "gauge", "Requests that are being answered.", [("", {}, self.streams)]

    def _admit(self, scope: Scope) -> None:
        headers, settings = Headers(scope=scope), self._settings
        host = headers.get("host", "")
        if not settings.knows_host(host):
            raise ApiError(403, f"host: this server is not addressed as {host[:100]!r} (--allow-host)", code="host")
        if self._key and _route(scope) not in OPEN:
            given = headers.get("authorization", "").encode("latin-1")
            # Digests: their length says nothing of the key's.
            if not hmac.compare_digest(_digest(given), self._key):
                raise ApiError(
                    401,
                    "api_key: missing or wrong; expected the header 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if scope["method"] == "POST":
            # Pages elsewhere may send other types, without their browser asking us whether they may.
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, f"content-type: expected application/json, got {kind[:100]!r}", code="content_type")
            length = headers.get("content-length", "")
            if length.isdecimal() and len(length) < 20 and int(length) > settings.max_body_bytes:
                raise self._too_large()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        try:
            return await asyncio.wait_for(self._whole(receive), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise ApiError(408, f"body: did not arrive within {BODY_SECONDS:g} s", code="timeout") from None

    async def _whole(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "body: the client went away", code="disconnect")
            body += message.get("body", b"")
            if len(body) > self._settings.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(body)

    def _too_large(self) -> ApiError:
        most = self._settings.max_body_bytes
        return ApiError(
            413, f"body: is larger than {most} bytes", code="body_too_large", headers={"Connection": "close"}
        )

    def _counted(self, path: str, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers[path if path in ROUTES else "other", message["status"]] += 1
            await send(message)

        return counted

    @contextmanager
    def _place(self) -> Iterator[None]:
        most = self._settings.max_streams
        if self.streams >= most:
            raise refused(429, f"this server answers {most} requests at a time; try again later", "too_many_requests")
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1


def _route(scope: Scope) -> str:
    """The path as the routes have it: others may have put the application below one of their own."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A receive() that begins with the whole body."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
