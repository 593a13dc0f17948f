"""Writes the events of one request as a JSON response or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing
from typing import Any

from specengine.server.chat.parsed_answer import ParsedAnswer
from specengine.server.errors import ApiError
from specengine.server.plain_answer import AnswerPart, AnswerWriter, Logprobs, PlainAnswer
from specengine.server.prepared_request import PreparedRequest
from specengine.server.response_format import count_tokens, count_usage, drafting_stats, make_choice
from specengine.server.token_attribution import Delta, TokenAttribution
from specengine.tokenizer import Tokenizer
from specengine.types import GenerationOutput, StreamEvent


class ResponseWriter:
    """Writes one response. Texts are numbered prompt by prompt, sample by sample."""

    def __init__(self, request: PreparedRequest, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        """ends: token ids that end a text."""
        self._request = request
        self._body = request.body
        self._envelope = request.envelope
        self._format = request.envelope.format
        self._samples = request.body.samples
        self._tokenizer = tokenizer
        drafter = request.key.drafter.partition(",")[0]
        self._attributions = [
            TokenAttribution(tokenizer, prompt, drafter, params.skip_special_tokens, ends)
            for prompt, params in zip(request.prompts, request.params, strict=True)
            for _ in range(self._samples)
        ]
        self._answers: list[AnswerWriter] = [
            PlainAnswer(self._format) if request.answer.is_plain else ParsedAnswer(request.answer)
            for _ in self._attributions
        ]

    async def write_whole(self, events: AsyncGenerator[StreamEvent, None]) -> dict[str, Any]:
        """Collects all events and returns the response."""
        deltas: list[list[Delta]] = [[] for _ in self._attributions]
        async with aclosing(events):
            async for event in events:
                delta = self._attributions[event.index].add(event)
                deltas[event.index].append(delta)
                self._answers[event.index].add(delta)
        outputs = [output for own in deltas if (output := own[-1].output)]
        choices = [self._whole_choice(own, output) for own, output in zip(deltas, outputs, strict=True)]
        usage = count_usage(outputs, self._samples)
        return self._envelope.wrap(self._format.object_name, choices, usage=usage)

    async def write_chunks(
        self, first: StreamEvent, events: AsyncGenerator[StreamEvent, None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a stream.  first: the event that the caller has taken from `events`."""
        options = self._body.stream_options
        reports_usage = bool(options and options.include_usage)
        counts_all = bool(reports_usage and options and options.continuous_usage_stats)
        num_tokens = [0] * len(self._attributions)
        outputs: dict[int, GenerationOutput] = {}

        def chunk(choice: dict[str, Any]) -> dict[str, Any]:
            index = choice["index"]
            prompt = self._request.prompts[index // self._samples]
            more = {"usage": count_tokens(len(prompt), num_tokens[index]) if counts_all else None}
            return self._envelope.wrap(self._format.chunk_name, [choice], **(more if reports_usage else {}))

        for index, answer in enumerate(self._answers):
            if answer.opening is not None:
                yield chunk(make_choice(index, answer.opening))
        try:
            event: StreamEvent | None = first
            while event is not None:
                num_tokens[event.index] += len(event.token_ids)
                delta = self._attributions[event.index].add(event)
                for choice in self._delta_choices(delta):
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

    def _whole_choice(self, deltas: list[Delta], output: GenerationOutput) -> dict[str, Any]:
        index = deltas[0].index
        answer = self._answers[index].whole(output)
        tokens = [token for delta in deltas for token in delta.tokens]
        cycles = [cycle for delta in deltas for cycle in delta.cycles]
        return make_choice(
            index,
            answer.field,
            logprobs=self._logprobs(answer.logprobs),
            reason=self._answers[index].finish_reason(output),
            speculation=self._attribution(tokens, cycles) | self._stats(index, output),
        )

    def _delta_choices(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yields the visible parts of an event's addition. The first one has the attribution of all its tokens."""
        attribution = self._attribution(delta.tokens, delta.cycles)
        parts = self._answers[delta.index].add(delta)
        if attribution and not parts:
            parts = [AnswerPart(self._format.delta(""), [])]
        for part in parts:
            yield make_choice(delta.index, part.field, logprobs=self._logprobs(part.logprobs), speculation=attribution)
            attribution = {}

    def _closing_choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        reason = self._answers[index].finish_reason(output)
        return make_choice(index, self._format.closing, reason=reason, speculation=self._stats(index, output))

    def _logprobs(self, entries: Logprobs | None) -> dict[str, Any] | None:
        count = self._body.num_top_logprobs
        return None if count is None or entries is None else self._format.logprobs(entries, self._tokenizer, count)

    def _attribution(self, tokens: list[tuple[str, str]], cycles: list[dict[str, int]]) -> dict[str, Any]:
        if not self._body.speculation.tokens or not (tokens or cycles):
            return {}
        return {"tokens": [{"text": text, "by": by} for text, by in tokens], "cycles": cycles}

    def _stats(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        if not self._body.speculation.stats:
            return {}
        prompt, sample = divmod(index, self._samples)
        key = self._request.key
        return {"stats": drafting_stats(output, key.drafter, key.rule, self._request.params[prompt], sample)}
