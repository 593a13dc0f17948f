"""Checks a request body against the model and the server's limits, and encodes its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specengine.engine.prompts import encode_prompt
from specengine.server.chat.constraint import constrain_text, make_constraint
from specengine.server.chat.schema import ChatRequest
from specengine.server.chat.template_use import TemplateUse
from specengine.server.engine_pool import EngineKey, EnginePool
from specengine.server.errors import ApiError, make_field_error
from specengine.server.response_format import CHAT, COMPLETION, Envelope
from specengine.server.schema import GenerationRequest
from specengine.server.settings import Settings
from specengine.tool_calls.answer_parser import AnswerFormat
from specengine.tool_calls.content_stops import ContentStops
from specengine.types import PromptTooLong, SamplingParams


@dataclass(frozen=True)
class PreparedRequest:
    """A valid request.  prompts: token ids.  params: one for each prompt.  answer: what its texts may hold."""

    body: GenerationRequest
    key: EngineKey
    prompts: list[list[int]]
    params: list[SamplingParams]
    envelope: Envelope
    answer: AnswerFormat


class RequestPreparer:
    """Prepares the requests of one server."""

    def __init__(self, pool: EnginePool, settings: Settings) -> None:
        self._pool = pool
        self._settings = settings
        self._template = TemplateUse(pool.tokenizer, settings)
        self._context = pool.model.config.max_position

    async def prepare(self, body: GenerationRequest) -> PreparedRequest:
        """Checks and encodes a request. Raises ApiError naming the field at fault."""
        self.check_model(body.model)
        key = self._pool.select(body.speculation)
        self._check_num_texts(body)
        # A long prompt takes milliseconds and a chat template up to half a second, so a thread does this.
        prompts, answer, more = await asyncio.to_thread(self._encode, body)
        try:
            more["adapter"] = body.model if body.model in self._settings.adapters else None
            params = [body.make_params(self._max_new_tokens(body, len(prompt)), **more) for prompt in prompts]
            # A grammar may take a tenth of a second to compile. The engine finds it compiled.
            await asyncio.to_thread(self._pool.model.grammars.constraint, params[0])
        except ValueError as error:
            raise make_field_error(error, body.prompt_field, body.constraint_field) from error
        response_format = CHAT if isinstance(body, ChatRequest) else COMPLETION
        return PreparedRequest(body, key, prompts, params, Envelope(response_format, body.model), answer)

    def _encode(self, body: GenerationRequest) -> tuple[list[list[int]], AnswerFormat, dict[str, Any]]:
        """Returns the prompts, what an answer may hold, and the engine's parameters for it."""
        if not isinstance(body, ChatRequest):
            own = {**constrain_text(body.constraint), "skip_special_tokens": body.skip_special_tokens is not False}
            return self._encode_prompts(body, body.prompts), AnswerFormat(), own
        arguments = self._template.arguments(body)
        prompts = self._encode_prompts(body, [self._template.messages(body)], arguments)
        answer = self._template.answer_format(body, prompts[0])
        constraint = make_constraint(body, answer, self._template.tag_tokens)
        shows_special = self._template.reads_special_tokens(answer) or body.skip_special_tokens is False
        more: dict[str, Any] = {**constraint, "skip_special_tokens": not shows_special}
        if body.stop and not answer.is_plain:
            more["stop"] = partial(ContentStops, answer, body.stop)
        return prompts, answer, more

    def check_model(self, name: str) -> None:
        """Raises ApiError unless this server has the model, or an adapter of this name."""
        names = (self._settings.name, *self._settings.adapters)
        if name not in names:
            message = f"model: this server has {', '.join(map(repr, names))}, got {name[:100]!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check_num_texts(self, body: GenerationRequest) -> None:
        most = self._settings.max_waiting + self._settings.max_batch_size
        texts = len(body.prompts) * body.samples
        if texts > most:
            field = "n" if len(body.prompts) == 1 else body.prompt_field
            message = f"{field}: the request asks for {texts} texts, this server accepts at most {most}"
            raise ApiError(400, message, param=field)

    def _encode_prompts(
        self, body: GenerationRequest, raw: Sequence[Any], arguments: Mapping[str, Any] | None = None
    ) -> list[list[int]]:
        """Returns token ids.  arguments: for the chat template."""
        field = body.prompt_field
        tokenizer, config = self._pool.tokenizer, self._pool.model.config
        try:
            prompts = [encode_prompt(each, tokenizer, config, arguments) for each in raw]
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            # The message begins with `prompt`, or with the template's file, which is none of the client's business.
            message = f"{field}: {str(error).partition(': ')[2]}"
            raise ApiError(400, message, param=field, code=code) from error
        most = self._settings.max_prompt_tokens
        longest = max(map(len, prompts))
        if most and longest > most:
            message = (
                f"{field}: has {longest} tokens; the prompt is too long, because this server accepts at most {most}"
            )
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        return prompts

    def _max_new_tokens(self, body: GenerationRequest, prompt_tokens: int) -> int:
        """Returns the token limit of a text. Raises ApiError if the request asks for more than fits."""
        most = self._settings.max_new_tokens
        requested = body.requested_tokens
        field = body.requested_tokens_field
        room = self._context - prompt_tokens
        if requested is not None and requested > room:
            message = (
                f"{field}: {requested} new tokens and a prompt of {prompt_tokens} do not fit: this model's maximum "
                f"context length is {self._context} tokens, so the prompt is too long for this {field}"
            )
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        if requested is not None and most and requested > most:
            raise ApiError(400, f"{field}: this server accepts at most {most}, got {requested}", param=field)
        return min(requested or body.default_max_tokens or room, room, most or room)
