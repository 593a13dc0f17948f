"""From a request to its answer: prompts are read, an engine is asked, its events become what the client reads."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specengine.engine.background_loop import Closed, GenerationFailed, Overloaded
from specengine.engine.prompts import PromptTooLong, encode_prompt
from specengine.server.engine_pool import Choice, Engines
from specengine.server.errors import ApiError, Json, of_request, refused
from specengine.server.events import EventStream, while_connected
from specengine.server.response_format import CHAT, COMPLETION, Envelope, choice, finish_reason, statistics, usage
from specengine.server.schema import ChatRequest, Request
from specengine.server.settings import Settings
from specengine.server.token_attribution import Part, Pieces
from specengine.types import GenerationOutput, RankFailed, SamplingParams, StreamEvent

FAILED = "a process that has a part of the model has failed: this server answers no more requests"

logger = logging.getLogger("specengine")


@dataclass(frozen=True)
class _Task:
    """A request that was found to be in order. prompts, params: one after the other."""

    body: Request
    choice: Choice
    prompts: list[list[int]]
    params: list[SamplingParams]
    envelope: Envelope

    @property
    def samples(self) -> int:
        return self.body.n or 1


class Answers:
    """Answers requests; each is one of an engine's, taken or refused as a whole."""

    def __init__(self, engines: Engines, settings: Settings) -> None:
        self._engines, self._settings = engines, settings

    async def answer(self, request: HttpRequest, body: Request) -> Response:
        """The response, once there is something to say. Raises ApiError, and Left where the client is gone by then."""
        task = await self._task(body)
        events = self._events(task)
        if not body.stream:
            outputs, parts = await while_connected(request.receive, self._collected(task, events))
            return Json(self._whole(task, outputs, parts))
        # What refuses a request, or fails at once, has a status of its own: nothing was sent so far.
        first = await while_connected(request.receive, anext(events))
        return EventStream(self._chunks(task, first, events), events, self._settings.deadline + 30)

    async def _task(self, body: Request) -> _Task:
        settings = self._settings
        if self._engines.failure:
            raise refused(503, f"{FAILED}; GET /health says why", "failed")
        if body.model != settings.name:
            message = f"model: this server has {settings.name!r}, got {body.model[:100]!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        chosen = self._engines.choice(body.speculation)
        if (wanted := len(body.prompts) * (body.n or 1)) > settings.max_waiting:
            field = "n" if len(body.prompts) == 1 else body.prompt_field
            message = f"{field}: {wanted} texts were asked for, this server takes {settings.max_waiting} at most"
            raise ApiError(400, message, param=field)
        # In a thread: a long text takes a while, and a chat template up to half a second.
        prompts = await asyncio.to_thread(self._encoded, body)
        try:
            params = [body.params(self._limit(body, len(prompt))) for prompt in prompts]
        except ValueError as error:
            raise of_request(error, body.prompt_field) from error
        form = CHAT if isinstance(body, ChatRequest) else COMPLETION
        return _Task(body, chosen, prompts, params, Envelope(form, settings.name))

    def _encoded(self, body: Request) -> list[list[int]]:
        field, most = body.prompt_field, self._settings.max_prompt_tokens
        try:
            prompts = [
                encode_prompt(each, self._engines.tokenizer, self._engines.model.config) for each in body.prompts
            ]
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            message = re.sub("^prompt: ", f"{field}: ", str(error))
            raise ApiError(400, message, param=field, code=code) from error
        longest = max(map(len, prompts))
        if most and longest > most:
            message = f"{field}: has {longest} tokens, this server takes {most} at most"
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        return prompts

    def _limit(self, body: Request, prompt: int) -> int:
        """Tokens that a text may have behind a prompt of so many."""
        context, most = self._engines.model.config.max_position, self._settings.max_new_tokens
        asked, field = body.asked_tokens, body.asked_field
        if asked is not None and prompt + asked > context:
            message = f"{field}: {asked} behind a prompt of {prompt} are more than the model's context of {context}"
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        if asked is not None and most and asked > most:
            raise ApiError(400, f"{field}: this server takes {most} at most, got {asked}", param=field)
        room = context - prompt
        return min(asked or body.default_tokens or room, room, most or room)

    async def _events(self, task: _Task) -> AsyncGenerator[StreamEvent, None]:
        """What the engine says. Raises ApiError for all that may go wrong there."""
        try:
            async with self._engines.leased(task.choice) as serving:
                events = serving.stream(task.prompts, task.params, deadline=self._settings.deadline)
                async with aclosing(events):
                    async for event in events:
                        yield event
        except ValueError as error:
            raise of_request(error, task.body.prompt_field) from error
        except Overloaded as error:
            raise refused(503, str(error), "overloaded") from error
        except Closed as error:
            raise refused(503, "this server is about to end", "closing") from error
        except (GenerationFailed, RankFailed) as error:  # the latter where an engine was to be made
            logger.error("a request failed: %s", error)
            if isinstance(error, RankFailed) or isinstance(error.__cause__, RankFailed):
                raise ApiError(500, f"{FAILED}; GET /health says why", code="failed") from error
            raise ApiError(500, "the model failed at this request; the server's log says why") from error

    def _pieces(self, task: _Task) -> list[Pieces]:
        """For each text of the answer."""
        tokenizer, drafter = self._engines.tokenizer, task.choice.drafter.partition(",")[0]
        return [Pieces(tokenizer, prompt, drafter) for prompt in task.prompts for _ in range(task.samples)]

    async def _collected(
        self, task: _Task, events: AsyncGenerator[StreamEvent, None]
    ) -> tuple[list[GenerationOutput], list[list[Part]]]:
        pieces = self._pieces(task)
        parts: list[list[Part]] = [[] for _ in pieces]
        async with aclosing(events):
            async for event in events:
                parts[event.index].append(pieces[event.index].part(event))
        return [output for own in parts if (output := own[-1].output)], parts

    def _whole(self, task: _Task, outputs: list[GenerationOutput], parts: list[list[Part]]) -> dict[str, Any]:
        form, choices = task.envelope.form, []
        for index, (output, own) in enumerate(zip(outputs, parts, strict=True)):
            merged = Part(
                index,
                output.text,
                [entry for part in own for entry in part.logprobs],
                [token for part in own for token in part.tokens],
                [cycle for part in own for cycle in part.cycles],
                output,
            )
            told = self._told(task, merged) | self._stats(task, index, output)
            logprobs, reason = self._logprobs(task, merged), finish_reason(output)
            choices.append(choice(index, form.whole(output.text), logprobs=logprobs, reason=reason, speculation=told))
        return task.envelope(form.whole_object, choices, usage=usage(outputs, task.samples))

    async def _chunks(
        self, task: _Task, first: StreamEvent, events: AsyncGenerator[StreamEvent, None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        form, body, pieces = task.envelope.form, task.body, self._pieces(task)
        outputs: dict[int, GenerationOutput] = {}
        counted = bool(body.stream_options and body.stream_options.include_usage)
        more = {"usage": None} if counted else {}

        def chunk(*choices: dict[str, Any]) -> dict[str, Any]:
            return task.envelope(form.part_object, [*choices], **more)

        if form.opening is not None:
            for index in range(len(pieces)):
                yield chunk(choice(index, form.opening))
        try:
            event: StreamEvent | None = first
            while event is not None:
                part = pieces[event.index].part(event)
                told, logprobs = self._told(task, part), self._logprobs(task, part)
                if part.text or told or part.logprobs:
                    yield chunk(choice(part.index, form.part(part.text), logprobs=logprobs, speculation=told))
                if output := part.output:
                    outputs[part.index], stats = output, self._stats(task, part.index, output)
                    reason = finish_reason(output)
                    yield chunk(choice(part.index, form.closing, reason=reason, speculation=stats))
                event = await anext(events, None)
        except ApiError as error:  # the status is sent: this is how clients learn of it
            yield error.body
            return
        if counted:
            ordered = [outputs[index] for index in range(len(pieces))]
            yield task.envelope(form.part_object, [], usage=usage(ordered, task.samples))

    def _logprobs(self, task: _Task, part: Part) -> dict[str, Any] | None:
        likeliest = task.body.likeliest
        if likeliest is None:
            return None
        return task.envelope.form.logprobs(part.logprobs, self._engines.tokenizer, likeliest)

    def _told(self, task: _Task, part: Part) -> dict[str, Any]:
        if not task.body.speculation.tokens or not (part.tokens or part.cycles):
            return {}
        return {"tokens": [{"text": text, "by": by} for text, by in part.tokens], "cycles": part.cycles}

    def _stats(self, task: _Task, index: int, output: GenerationOutput) -> dict[str, Any]:
        if not task.body.speculation.stats:
            return {}
        prompt, sample = divmod(index, task.samples)
        chosen = task.choice
        return {"stats": statistics(output, chosen.drafter, chosen.rule, task.params[prompt], sample)}
