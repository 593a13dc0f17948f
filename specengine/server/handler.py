"""Answers requests: it prepares them, runs them on an engine, and returns their responses."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specengine.server.engine_pool import SHUTTING_DOWN, EnginePool
from specengine.server.errors import ApiError, JsonResponse, make_field_error, make_retryable_error
from specengine.server.events import EventStream, run_while_connected
from specengine.server.prepared_request import PreparedRequest, RequestPreparer
from specengine.server.response_writer import ResponseWriter
from specengine.server.schema import GenerationRequest
from specengine.server.settings import Settings
from specengine.types import Closed, ConstraintFailed, GenerationFailed, Overloaded, RankFailed, StreamEvent

FAILED = "a process of the model has failed and this server accepts no more requests; see GET /health"
READ_SECONDS = 30.0  # seconds after the deadline in which a client must have read its stream

logger = logging.getLogger("specengine")


class Handler:
    """Answers generation requests. An engine accepts or refuses all texts of a request together."""

    def __init__(self, pool: EnginePool, settings: Settings) -> None:
        self._pool = pool
        self._settings = settings
        self._preparer = RequestPreparer(pool, settings)

    async def handle(self, request: HttpRequest, body: GenerationRequest) -> Response:
        """Returns the whole response, or a stream once its first event exists.

        Raises ApiError, and ClientDisconnected if the client disconnects first.
        """
        if self._pool.failure:
            raise make_retryable_error(503, FAILED, "failed")
        prepared = await self._preparer.prepare(body)
        events = self._run(prepared)
        writer = ResponseWriter(prepared, self._pool.tokenizer, self._pool.model.eos_token_ids)
        if not body.stream:
            return JsonResponse(await run_while_connected(request.receive, writer.write_whole(events)))
        # An error before the first event still gets its own HTTP status.
        first = await run_while_connected(request.receive, anext(events))
        chunks = writer.write_chunks(first, events)
        return EventStream(chunks, events, self._settings.deadline + READ_SECONDS)

    def check_model(self, name: str) -> None:
        """Raises ApiError unless this server has the model."""
        self._preparer.check_model(name)

    async def _run(self, prepared: PreparedRequest) -> AsyncGenerator[StreamEvent, None]:
        """Yields the engine's events. Raises ApiError for every error of the engine."""
        try:
            async with self._pool.lease(prepared.key) as engine:
                events = engine.stream(prepared.prompts, prepared.params, deadline=self._settings.deadline)
                async with aclosing(events):
                    async for event in events:
                        yield event
        except ValueError as error:
            raise make_field_error(error, prepared.body.prompt_field, prepared.body.constraint_field) from error
        except Overloaded as error:
            raise make_retryable_error(503, str(error), "overloaded") from error
        except Closed as error:
            raise make_retryable_error(503, SHUTTING_DOWN, "closing") from error
        except ConstraintFailed as error:
            field = prepared.body.constraint_field or "tools"
            raise ApiError(400, f"{field}: {str(error).partition(': ')[2]}", param=field) from error
        except (GenerationFailed, RankFailed) as error:  # making an engine can raise RankFailed too
            logger.error("a request failed: %s", error)
            if isinstance(error, RankFailed) or isinstance(error.__cause__, RankFailed):
                raise ApiError(500, FAILED, code="failed") from error
            raise ApiError(500, "the model failed on this request; the server's log has the reason") from error
