"""The application: its routes, and what becomes of errors."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specengine.engine.prometheus import exposition
from specengine.server.engine_pool import Engines
from specengine.server.errors import ApiError, Json
from specengine.server.events import Left
from specengine.server.handler import Answers
from specengine.server.limits import Limits
from specengine.server.schema import ChatRequest, CompletionRequest, invalid
from specengine.server.settings import Settings

PAGE = Path(__file__).with_name("page.html")
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger("specengine")


def make_app(engines: Engines, settings: Settings) -> Limits:
    """The server of a model's engines, as an ASGI application, which closes them when it ends."""
    answers, page, started = Answers(engines, settings), PAGE.read_text(encoding="utf-8"), int(time.time())

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engines.close()

    # The pages of documentation that FastAPI makes load scripts from elsewhere.
    app = FastAPI(lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    limits = Limits(app, settings)

    async def answer(request: HttpRequest, body: Any) -> Response:
        try:
            return await answers.answer(request, body)
        except Left:
            return Response(status_code=499)  # nobody reads it

    @app.post("/v1/chat/completions")
    async def chat_completions(request: HttpRequest, body: ChatRequest) -> Response:
        return await answer(request, body)

    @app.post("/v1/completions")
    async def completions(request: HttpRequest, body: CompletionRequest) -> Response:
        return await answer(request, body)

    about = {
        "id": settings.name,
        "object": "model",
        "created": started,
        "owned_by": "specengine",
        "context_length": engines.model.config.max_position,
        "speculation": {"drafters": settings.drafters, "rules": settings.rules},
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [about]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != settings.name:
            message = f"model: this server has {settings.name!r}, got {name[:100]!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return Json(about)

    @app.get("/health")
    async def health() -> Response:
        if failure := engines.failure:
            return Json({"status": "failed", "why": failure}, 503)
        return Json({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(engines.metrics, limits.families()), media_type=PROMETHEUS)

    @app.get("/")
    async def chat_page() -> Response:
        return Response(page, media_type="text/html", headers=_page_headers(page))

    @app.exception_handler(ApiError)
    async def refused(_: HttpRequest, error: ApiError) -> Response:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def not_understood(_: HttpRequest, error: RequestValidationError) -> Response:
        return invalid([*error.errors()]).response

    @app.exception_handler(HTTPException)
    async def no_such_place(request: HttpRequest, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response

    @app.exception_handler(Exception)
    async def failed(_: HttpRequest, error: Exception) -> Response:
        return ApiError(500, "this server failed at this request; its log says why").response

    return limits


def _page_headers(page: str) -> dict[str, str]:
    """What lets the page's own script and style work, and nothing else, from nowhere else."""

    def digest(tag: str) -> str:
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
