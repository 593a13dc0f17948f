"""Writes an answer that is one text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from specengine.server.response_format import ResponseFormat, api_finish_reason
from specengine.server.token_attribution import Delta
from specengine.types import GenerationOutput, TokenLogprob

Logprobs = list[tuple[int, TokenLogprob]]  # with offsets in the text


@dataclass(frozen=True)
class AnswerPart:
    """An addition to an answer: the field of a choice, and the log-probabilities of its text, or None for no text."""

    field: dict[str, Any]
    logprobs: Logprobs | None


class AnswerWriter(Protocol):
    """Writes one answer, addition by addition or as a whole.  opening: field of the first chunk, or None."""

    opening: dict[str, Any] | None

    def add(self, delta: Delta) -> list[AnswerPart]:
        """Takes the next addition to the text and returns the visible parts that are certain now."""

    def whole(self, output: GenerationOutput) -> AnswerPart:
        """Returns the whole answer; to be called after all additions."""

    def finish_reason(self, output: GenerationOutput) -> str:
        """Returns the API's reason for the end of the answer."""


class PlainAnswer:
    """Writes a text as it is."""

    def __init__(self, response_format: ResponseFormat) -> None:
        self._format = response_format
        self.opening = response_format.opening
        self._logprobs: Logprobs = []

    def add(self, delta: Delta) -> list[AnswerPart]:
        """See AnswerWriter."""
        self._logprobs += delta.logprobs
        if not (delta.text or delta.logprobs):
            return []
        return [AnswerPart(self._format.delta(delta.text), delta.logprobs)]

    def whole(self, output: GenerationOutput) -> AnswerPart:
        """See AnswerWriter."""
        return AnswerPart(self._format.whole(output.text), self._logprobs)

    def finish_reason(self, output: GenerationOutput) -> str:
        """See AnswerWriter."""
        return api_finish_reason(output)
