"""Writes an answer with reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from specengine.server.plain_answer import AnswerPart, Logprobs
from specengine.server.response_format import api_finish_reason
from specengine.server.token_attribution import Delta
from specengine.tool_calls.answer_parser import AnswerFormat, AnswerParser
from specengine.tool_calls.events import Arguments, Content, Event, Reasoning, ToolStart
from specengine.types import GenerationOutput


class ParsedAnswer:
    """Splits a text into reasoning, content and tool calls.

    A call begins with a part that has its id and name; parts with pieces of its arguments follow.
    Log-probabilities are those of the content, as in OpenAI's API.
    """

    def __init__(self, answer: AnswerFormat) -> None:
        self.opening: dict[str, Any] | None = {
            "delta": {"role": "assistant", "content": None}
        }  # there may be no content
        self._parser = AnswerParser(answer)
        self._dialect = answer.dialect
        self._calls: list[dict[str, Any]] = []
        self._content = ""
        self._reasoning = ""
        self._undecided: Logprobs = []
        self._logprobs: Logprobs = []

    def add(self, delta: Delta) -> list[AnswerPart]:
        """See AnswerWriter."""
        self._undecided += delta.logprobs
        events = self._parser.feed(delta.text)
        if delta.output is not None:
            events += self._parser.finish(complete=delta.output.finish_reason == "stop")
        return [part for kind, own in groupby(events, type) for part in self._write(kind, [*own])]

    def _write(self, kind: type[Event], events: list[Any]) -> Iterable[AnswerPart]:
        """Yields the parts of neighbouring events of one kind."""
        if kind is ToolStart:
            yield from (self._begin_call(event.name) for event in events)
            return
        text = "".join(event.text for event in events)
        if kind is Content:
            self._content += text
            yield AnswerPart({"delta": {"content": text}}, self._take_logprobs(events))
        elif kind is Reasoning:
            self._reasoning += text
            yield AnswerPart({"delta": {"reasoning_content": text, "reasoning": text}}, None)
        elif kind is Arguments:
            self._calls[-1]["function"]["arguments"] += text
            piece = {"index": len(self._calls) - 1, "function": {"arguments": text}}
            yield AnswerPart({"delta": {"tool_calls": [piece]}}, None)

    def _begin_call(self, name: str) -> AnswerPart:
        assert self._dialect is not None
        call = {"id": self._dialect.make_id(), "type": "function"}
        self._calls.append({**call, "function": {"name": name, "arguments": ""}})
        start = {"index": len(self._calls) - 1, **call, "function": {"name": name, "arguments": ""}}
        return AnswerPart({"delta": {"tool_calls": [start]}}, None)

    def _take_logprobs(self, pieces: list[Content]) -> Logprobs:
        """Returns the entries of tokens that begin in these pieces, and drops earlier ones."""
        taken: Logprobs = []
        for piece in pieces:
            end = piece.at + len(piece.text)
            taken += [entry for entry in self._undecided if piece.at <= entry[0] < end]
            self._undecided = [entry for entry in self._undecided if entry[0] >= end]
        self._logprobs += taken
        return taken

    def whole(self, output: GenerationOutput) -> AnswerPart:
        """See AnswerWriter."""
        content = self._content or (None if self._calls or self._reasoning else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message |= {"reasoning_content": self._reasoning, "reasoning": self._reasoning}
        if self._calls:
            message["tool_calls"] = self._calls
        return AnswerPart({"message": message}, None if content is None else self._logprobs)

    def finish_reason(self, output: GenerationOutput) -> str:
        """See AnswerWriter. An answer with calls that ended by itself has the reason `tool_calls`."""
        reason = api_finish_reason(output)
        return "tool_calls" if self._calls and reason == "stop" else reason
