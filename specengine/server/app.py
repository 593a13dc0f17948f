"""The ASGI application: its routes and error handlers."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from specengine.engine.prometheus import exposition
from specengine.server.body import UnknownFields, parse_body
from specengine.server.chat.schema import ChatRequest
from specengine.server.engine_pool import EnginePool
from specengine.server.errors import ApiError, JsonResponse
from specengine.server.events import ClientDisconnected
from specengine.server.handler import Handler
from specengine.server.limits import LimitsMiddleware
from specengine.server.schema import CompletionRequest, GenerationRequest
from specengine.server.settings import Settings

PAGE = Path(__file__).with_name("page.html")
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
READ = ["GET", "HEAD"]


def make_app(pool: EnginePool, settings: Settings) -> ASGIApp:
    """Makes the application of a server. It closes the pool when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await pool.close()

    # FastAPI's documentation pages load scripts from other sites.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    limits = LimitsMiddleware(app, settings)
    handler = Handler(pool, settings)
    _add_generation_routes(app, handler, settings)
    _add_model_routes(app, handler, pool, settings)
    _add_status_routes(app, pool, limits)
    _add_page_route(app)
    _add_error_handlers(app)
    return _allow_origins(limits, settings.allowed_origins)


def _allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns an application whose responses pages of these origins may read. It answers their preflights itself."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin.lower() for origin in origins],
        allow_methods=[*READ, "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )


def _add_generation_routes(app: FastAPI, handler: Handler, settings: Settings) -> None:
    unknown = UnknownFields() if settings.ignore_unknown_fields else None

    async def handle(request: HttpRequest, kind: type[GenerationRequest]) -> Response:
        try:
            return await handler.handle(request, parse_body(kind, await request.body(), unknown))
        except ClientDisconnected:
            return Response(status_code=499)  # counted in the metrics; no client reads it

    @app.post("/v1/chat/completions")
    async def chat_completions(request: HttpRequest) -> Response:
        return await handle(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: HttpRequest) -> Response:
        return await handle(request, CompletionRequest)


def _add_model_routes(app: FastAPI, handler: Handler, pool: EnginePool, settings: Settings) -> None:
    card = {
        "id": settings.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "specengine",
        "context_length": pool.model.config.max_position,
        "speculation": {"drafters": settings.drafters, "rules": settings.rules},
    }
    cards = {settings.name: card}
    cards |= {name: {**card, "id": name, "parent": settings.name} for name in settings.adapters}

    @app.api_route("/v1/models/", methods=READ)
    @app.api_route("/v1/models", methods=READ)
    async def list_models() -> Response:
        return JsonResponse({"object": "list", "data": [*cards.values()]})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def retrieve_model(name: str) -> Response:
        handler.check_model(name)
        return JsonResponse(cards[name])


def _add_status_routes(app: FastAPI, pool: EnginePool, limits: LimitsMiddleware) -> None:
    @app.api_route("/health", methods=READ)
    async def health() -> Response:
        if failure := pool.failure:
            return JsonResponse({"status": "failed", "why": failure}, 503)
        return JsonResponse({"status": "ok"})

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        return Response(exposition(pool.metrics, limits.metric_families()), media_type=PROMETHEUS)


def _add_page_route(app: FastAPI) -> None:
    page = PAGE.read_text(encoding="utf-8")
    headers = _page_headers(page)

    @app.api_route("/", methods=READ)
    async def chat_page() -> Response:
        return Response(page, media_type="text/html", headers=headers)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: HttpRequest, error: ApiError) -> Response:
        return error.response

    @app.exception_handler(HTTPException)
    async def http_error(request: HttpRequest, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response

    @app.exception_handler(Exception)
    async def internal_error(_: HttpRequest, error: Exception) -> Response:
        return ApiError(500, "this server failed on this request; its log has the reason").response


def _page_headers(page: str) -> dict[str, str]:
    """Returns headers that allow the page's own script, style and server, and nothing else."""

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
