"""Writes the events of one request as a JSON response or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from specengine.server.errors import ApiError
from specengine.server.prepared_request import PreparedRequest
from specengine.server.response_format import api_finish_reason, count_usage, drafting_stats, make_choice
from specengine.server.token_attribution import Delta, TokenAttribution
from specengine.tokenizer import Tokenizer
from specengine.types import GenerationOutput, StreamEvent


class ResponseWriter:
    """Writes one response. Texts are numbered prompt by prompt, sample by sample."""

    def __init__(self, request: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._body = request.body
        self._envelope = request.envelope
        self._format = request.envelope.format
        self._samples = request.body.samples
        self._tokenizer = tokenizer
        drafter = request.key.drafter.partition(",")[0]
        self._attributions = [
            TokenAttribution(tokenizer, prompt, drafter) for prompt in request.prompts for _ in range(self._samples)
        ]

    async def write_whole(self, events: AsyncGenerator[StreamEvent, None]) -> dict[str, Any]:
        """Collects all events and returns the response."""
        deltas: list[list[Delta]] = [[] for _ in self._attributions]
        async with aclosing(events):
            async for event in events:
                deltas[event.index].append(self._attributions[event.index].add(event))
        outputs = [output for own in deltas if (output := own[-1].output)]
        choices = [self._whole_choice(_merge(own, output), output) for own, output in zip(deltas, outputs, strict=True)]
        usage = count_usage(outputs, self._samples)
        return self._envelope.wrap(self._format.object_name, choices, usage=usage)

    async def write_chunks(
        self, first: StreamEvent, events: AsyncGenerator[StreamEvent, None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a stream.  first: the event that the caller has taken from `events`."""
        options = self._body.stream_options
        reports_usage = bool(options and options.include_usage)
        more = {"usage": None} if reports_usage else {}
        outputs: dict[int, GenerationOutput] = {}

        def chunk(choice: dict[str, Any]) -> dict[str, Any]:
            return self._envelope.wrap(self._format.chunk_name, [choice], **more)

        if self._format.opening is not None:
            for index in range(len(self._attributions)):
                yield chunk(make_choice(index, self._format.opening))
        try:
            event: StreamEvent | None = first
            while event is not None:
                delta = self._attributions[event.index].add(event)
                if choice := self._delta_choice(delta):
                    yield chunk(choice)
                if delta.output:
                    outputs[delta.index] = delta.output
                    yield chunk(self._closing_choice(delta.index, delta.output))
                event = await anext(events, None)
        except ApiError as error:  # the status line is sent, so the error is the last chunk
            yield error.body
            return
        if reports_usage:
            usage = count_usage([outputs[index] for index in range(len(self._attributions))], self._samples)
            yield self._envelope.wrap(self._format.chunk_name, [], usage=usage)

    def _whole_choice(self, delta: Delta, output: GenerationOutput) -> dict[str, Any]:
        return make_choice(
            delta.index,
            self._format.whole(output.text),
            logprobs=self._logprobs(delta),
            reason=api_finish_reason(output),
            speculation=self._attribution(delta) | self._stats(delta.index, output),
        )

    def _delta_choice(self, delta: Delta) -> dict[str, Any] | None:
        """Returns None for an event that adds nothing visible."""
        attribution = self._attribution(delta)
        if not (delta.text or attribution or delta.logprobs):
            return None
        content = self._format.delta(delta.text)
        return make_choice(delta.index, content, logprobs=self._logprobs(delta), speculation=attribution)

    def _closing_choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        reason = api_finish_reason(output)
        return make_choice(index, self._format.closing, reason=reason, speculation=self._stats(index, output))

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        count = self._body.num_top_logprobs
        return None if count is None else self._format.logprobs(delta.logprobs, self._tokenizer, count)

    def _attribution(self, delta: Delta) -> dict[str, Any]:
        if not self._body.speculation.tokens or not (delta.tokens or delta.cycles):
            return {}
        return {"tokens": [{"text": text, "by": by} for text, by in delta.tokens], "cycles": delta.cycles}

    def _stats(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        if not self._body.speculation.stats:
            return {}
        prompt, sample = divmod(index, self._samples)
        key = self._request.key
        return {"stats": drafting_stats(output, key.drafter, key.rule, self._request.params[prompt], sample)}


def _merge(deltas: list[Delta], output: GenerationOutput) -> Delta:
    """Joins the deltas of one text."""
    return Delta(
        deltas[0].index,
        output.text,
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        tokens=[token for delta in deltas for token in delta.tokens],
        cycles=[cycle for delta in deltas for cycle in delta.cycles],
        output=output,
    )
