"""Stop strings in the content of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.tokenizer import StopStrings
from specengine.tool_calls.answer_events import parse_answer
from specengine.tool_calls.answer_format import AnswerFormat
from specengine.tool_calls.events import Content
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_pieces import SPACES


class ContentStops:
    """Finds the first stop string in the content of a text: never in reasoning, in calls, in tags, or across them.

    Space after reasoning and calls, which the answer drops, is not searched. Works as StopStrings does: it takes and
    returns the whole text, up to the stop string.

    stops: checked strings, as in SamplingParams.stop.
    """

    def __init__(self, answer: AnswerFormat, stops: Sequence[str]) -> None:
        self._growing = GrowingText()
        self._parsing = parse_answer(self._growing, answer)
        self._stops = stops
        self._search = StopStrings(stops)
        self._text = ""  # what was not returned yet
        self._returned = 0
        self._end = 0  # of the content that was searched last
        self._held = 0  # characters before it that may begin a stop string
        self._skips_space = False
        self._may_end = True

    @property
    def matched(self) -> str | None:
        """Returns the stop string that was found, or None."""
        return self._search.matched

    def feed(self, piece: str, may_end: bool = True) -> tuple[str, bool]:
        """Takes the next piece. Returns the text that surely precedes any stop string, and whether one is complete.

        may_end: whether one may end in the content that becomes certain with this piece.
        """
        if self.matched is not None:
            return "", True
        self._may_end = may_end
        self._text += piece
        self._growing.feed(piece)
        stop = self._find()
        if stop is not None:
            return self._take(stop), True
        return self._take(self._end - self._held if self._held else self._growing.decided), False

    def finish(self) -> str:
        """Ends the text and returns the part that was held back, up to a stop string."""
        self._growing.end()
        stop = self._find()
        return self._take(self._returned + len(self._text) if stop is None else stop)

    def _find(self) -> int | None:
        """Searches what the text has become certain of. Returns where a stop string begins."""
        for event in self._parsing:
            if event is None:
                break
            if not isinstance(event, Content):
                self._held, self._end = 0, -1
            elif (stop := self._search_piece(event)) is not None:
                return stop
        return None

    def _search_piece(self, piece: Content) -> int | None:
        if piece.at != self._end:  # there is something else before it
            self._search, self._held, self._skips_space = StopStrings(self._stops), 0, True
        self._end = piece.at + len(piece.text)
        text = piece.text.lstrip(SPACES) if self._skips_space else piece.text
        self._skips_space = self._skips_space and not text
        emitted, stopped = self._search.feed(text, self._may_end)
        if stopped:
            return self._end - len(text) - self._held + len(emitted)
        self._held += len(text) - len(emitted)
        return None

    def _take(self, end: int) -> str:
        text, self._text = self._text[: end - self._returned], self._text[end - self._returned :]
        self._returned = end
        return text
