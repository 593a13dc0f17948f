"""Splits an answer into reasoning, content and tool calls while it arrives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from specengine.tool_calls.answer_events import parse_answer
from specengine.tool_calls.answer_format import AnswerFormat
from specengine.tool_calls.events import Content, Event, Reasoning, ToolStart
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_pieces import SPACES

__all__ = ["AnswerFormat", "AnswerParser"]

Piece = Content | Reasoning


class AnswerParser:
    """Parses one answer. The joined events depend on the text alone, not on the pieces in which it arrives.

    Space around reasoning and calls is dropped; between two texts, the space before the first call that has some stays.
    Arguments are valid JSON. A call that the end of a cut text cuts keeps incomplete ones.
    """

    def __init__(self, answer: AnswerFormat) -> None:
        self._text = GrowingText()
        self._parsing = parse_answer(self._text, answer)
        self._content = _Trimmed()
        self._reasoning = _Trimmed(strip=True)
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return self._num_calls

    def feed(self, piece: str) -> list[Event]:
        """Takes the next piece and returns all events that are certain now."""
        self._text.feed(piece)
        return [*self._drain()]

    def finish(self, complete: bool = False) -> list[Event]:
        """Ends the text and returns the remaining events.

        complete: the model ended the text, so the arguments of a call that it left open are closed.
        """
        self._text.end(complete)
        events = [*self._drain()]
        return events if self._num_calls or self._content.is_split else [*events, *self._content.rest()]

    def _drain(self) -> Iterable[Event]:
        for event in self._parsing:
            if event is None:
                return
            if isinstance(event, Content):
                yield from self._content.add(event)
            elif isinstance(event, Reasoning):
                self._content.strip = True
                self._content.close()
                yield from self._reasoning.add(event)
            else:
                if isinstance(event, ToolStart):
                    self._num_calls += 1
                    self._content.strip = True
                    self._content.close()
                yield event


class _Trimmed:
    """Holds back space until other text follows it.

    strip: drops the space before the first text.  is_split: something stands between two texts, or after the last.
    """

    def __init__(self, strip: bool = False) -> None:
        self.strip = strip
        self.is_split = False
        self._begun = False
        self._closed = False  # no more space is held
        self._held: list[Piece] = []

    def close(self) -> None:
        """Says that something else follows. Drops space up to the next text, if some is held."""
        self._closed = bool(self._held)
        self.is_split = self.is_split or self._begun

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
        """Returns the space at the end, which may be the whole text."""
        return self._held if self._begun or not self.strip else []
