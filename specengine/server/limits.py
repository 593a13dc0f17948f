"""Limits that a request must pass before the application reads it: size, host, key, media type, a free slot."""

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
from specengine.server.errors import ApiError, make_retryable_error
from specengine.server.settings import Settings

BODY_SECONDS = 30.0  # in which a body must arrive
HEAD_BYTES = 1 << 16  # of a path and its headers
OPEN_ROUTES = ("/", "/health")  # need no key
ROUTES = (*OPEN_ROUTES, "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions")


class LimitsMiddleware:
    """Applies the limits in front of the application, and counts responses.

    It reads the whole body before the request takes a slot, so a slow sender blocks no other request.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._key = _digest(settings.api_key.encode()) if settings.api_key else None
        self._responses: Counter[tuple[str, int]] = Counter()
        self._running = 0  # requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._count_response(_route_of(scope), send)
        try:
            self._check_head(scope)
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            receive = _replay_body(await self._read_body(receive), receive)
            with self._take_slot():
                await self._app(scope, receive, send)
        except ApiError as error:
            await error.response(scope, receive, send)

    def metric_families(self) -> Iterable[Family]:
        """Yields the counts in the form that the engine's metrics have."""
        responses: list[Sample] = [
            ("", {"path": path, "status": status}, count) for (path, status), count in self._responses.items()
        ]
        yield "http_responses_total", "counter", "Responses that began, by path and status.", responses
        yield "http_requests_running", "gauge", "Requests that hold a slot.", [("", {}, self._running)]

    def _check_head(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if size + len(scope["path"]) + len(scope["query_string"]) > HEAD_BYTES:
            raise ApiError(431, f"head: is larger than {HEAD_BYTES} bytes", code="head_too_large")
        host = headers.get("host", "")
        if not self._settings.accepts_host(host):
            raise ApiError(
                403, f"host: this server does not accept the name {host[:100]!r} (--allow-host)", code="host"
            )
        if self._key and _route_of(scope) not in OPEN_ROUTES:
            _check_key(headers, self._key)
        if scope["method"] == "POST":
            self._check_body_headers(headers)

    def _check_body_headers(self, headers: Headers) -> None:
        # A browser lets pages of other sites send other media types without asking this server first.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"content-type: expected application/json, got {kind[:100]!r}", code="content_type")
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise ApiError(
                415,
                f"content-encoding: expected none, got {encoding[:100]!r}",
                code="content_encoding",
                headers={"Accept-Encoding": "identity"},
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20 and int(length) > self._settings.max_body_bytes:
            raise self._too_large()

    async def _read_body(self, receive: Receive) -> bytes:
        try:
            return await asyncio.wait_for(self._read_all(receive), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise ApiError(408, f"body: did not arrive within {BODY_SECONDS:g} s", code="timeout") from None

    async def _read_all(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "body: the client disconnected", code="disconnect")
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

    def _count_response(self, path: str, send: Send) -> Send:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses[path if path in ROUTES else "other", message["status"]] += 1
            await send(message)

        return counting_send

    @contextmanager
    def _take_slot(self) -> Iterator[None]:
        most = self._settings.max_streams
        if self._running >= most:
            message = f"this server runs at most {most} requests at a time; try again later"
            raise make_retryable_error(429, message, "too_many_requests")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


def _route_of(scope: Scope) -> str:
    """Returns the path below the application's root, which a proxy such as Ray's may set."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _check_key(headers: Headers, key: bytes) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # The comparison of digests does not reveal the length of the key.
    right = hmac.compare_digest(_digest(given.strip().encode("latin-1")), key)
    if not right or scheme.lower() != "bearer":
        raise ApiError(
            401,
            "api_key: missing or wrong; expected the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Returns a receive() that first returns the whole body."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
