"""Splits an answer into reasoning, content and tool calls while it arrives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specengine.tool_calls.dialects import Dialect
from specengine.tool_calls.events import Content, Event, Parsing, Reasoning, ToolStart
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_pieces import SPACES
from specengine.tool_calls.reasoning import ReasoningTags

Piece = Content | Reasoning


@dataclass(frozen=True)
class AnswerFormat:
    """What an answer may hold.

    dialect: None finds no calls.  tools: the JSON schema of each function's parameters, by name.
    reasoning: None finds no reasoning.  opened: the prompt has opened the reasoning.
    """

    dialect: Dialect | None = None
    tools: Mapping[str, Any] = field(default_factory=dict)
    reasoning: ReasoningTags | None = None
    opened: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the whole text is content."""
        return self.dialect is None and self.reasoning is None

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the parser must see, which may be special tokens."""
        own = self.dialect.markers if self.dialect else ()
        return (*own, self.reasoning.open, self.reasoning.close) if self.reasoning else own


class AnswerParser:
    """Parses one answer. The joined events depend on the text alone, not on the pieces in which it arrives.

    Space around reasoning and calls is dropped; between two texts, the space before the first call that has some stays.
    A call that the end of the text cuts keeps incomplete arguments.
    """

    def __init__(self, answer: AnswerFormat) -> None:
        self._text = GrowingText()
        self._parsing = _parse_answer(self._text, answer)
        self._content = _Trimmed()
        self._reasoning = _Trimmed(strip=True)
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return self._num_calls

    @property
    def position(self) -> int:
        """The characters whose events are known."""
        return self._text.position

    def feed(self, piece: str) -> list[Event]:
        """Takes the next piece and returns all events that are certain now."""
        self._text.feed(piece)
        return [*self._drain()]

    def finish(self) -> list[Event]:
        """Ends the text and returns the remaining events."""
        self._text.end()
        events = [*self._drain()]
        return events if self._num_calls else [*events, *self._content.rest()]

    def _drain(self) -> Iterable[Event]:
        for event in self._parsing:
            if event is None:
                return
            if isinstance(event, Content):
                yield from self._content.add(event)
            elif isinstance(event, Reasoning):
                self._content.strip = True
                yield from self._reasoning.add(event)
            else:
                if isinstance(event, ToolStart):
                    self._num_calls += 1
                    self._content.strip = True
                    self._content.close()
                yield event


class _Trimmed:
    """Holds back space until other text follows it.  strip: drops the space before the first text."""

    def __init__(self, strip: bool = False) -> None:
        self.strip = strip
        self._begun = False
        self._closed = False  # no more space is held
        self._held: list[Piece] = []

    def close(self) -> None:
        """Drops space up to the next text, if some is held."""
        self._closed = bool(self._held)

    def add(self, piece: Piece) -> Iterable[Piece]:
        """Takes a piece and yields the pieces that are certain now."""
        body = piece.text.rstrip(SPACES)
        if body:
            if self._begun or not self.strip:
                yield from self._held
            if self._closed or (self.strip and not self._begun):
                body = body.lstrip(SPACES)
            self._held = []
            self._begun, self._closed = True, False
            start = len(piece.text.rstrip(SPACES)) - len(body)
            yield replace(piece, text=body, at=piece.at + start)
            piece = replace(piece, text=piece.text[start + len(body) :], at=piece.at + start + len(body))
        if piece.text and not self._closed:
            self._held.append(piece)

    def rest(self) -> list[Piece]:
        """Returns the space at the end."""
        return self._held


def _parse_answer(text: GrowingText, answer: AnswerFormat) -> Parsing[None]:
    dialect = answer.dialect
    if answer.reasoning:
        yield from _parse_reasoning(text, answer, answer.reasoning)
    if dialect is None:
        yield from text.stream_until((), Content)
        return
    if dialect.bare:
        yield from _try_call(text, answer, "", strict=True)
    while tag := (yield from text.stream_until(dialect.openers, Content)):
        at = text.position - len(tag)
        if not (yield from _try_call(text, answer, tag, strict=False)):
            yield Content(tag, at)


def _parse_reasoning(text: GrowingText, answer: AnswerFormat, tags: ReasoningTags) -> Parsing[None]:
    """Reads the reasoning, if there is any, and its closing tag.

    Qwen3.5 may call a tool without a closing tag. So a call to one of the request's tools ends the reasoning too.
    """
    start = text.keep()
    yield from text.skip(SPACES)
    tagged = yield from text.accept(tags.open)
    if not tagged:
        text.rewind(start)
    text.release()
    if not tagged and not answer.opened:
        return
    openers = answer.dialect.openers if answer.dialect else ()
    while tag := (yield from text.stream_until((tags.close, *openers), Reasoning)):
        if tag == tags.close:
            return
        at = text.position - len(tag)
        if (yield from _try_call(text, answer, tag, strict=True)):
            return
        yield Reasoning(tag, at)


def _try_call(text: GrowingText, answer: AnswerFormat, tag: str, strict: bool) -> Parsing[bool]:
    """Reads the calls behind a tag. Where none begins, reads nothing and returns False."""
    assert answer.dialect is not None
    start = text.keep()
    found = yield from answer.dialect.parse_call(text, tag, answer.tools, strict)
    if not found:
        text.rewind(start)
    text.release()
    return found
