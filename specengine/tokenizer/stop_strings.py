"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StopSearch(Protocol):
    """Finds the end of one text."""

    @property
    def matched(self) -> str | None:
        """Returns what was found, or None."""

    def feed(self, piece: str, may_end: bool = True) -> tuple[str, bool]:
        """Takes the next piece.  may_end: whether the text may end in what becomes certain with it.

        Returns the text that surely stays, and whether the text ends there.
        """

    def finish(self) -> str:
        """Ends the text and returns the part that was held back and stays."""


class StopStrings:
    """Finds the first complete stop string, however the text is split into pieces.

    The stop string that ends first wins; of several that end together, the longest wins. So the result depends on the
    text alone. Feed the text of one token at a time to learn which token completes a stop string.

    stops: checked strings, as in SamplingParams.stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """Returns the stop string that was found, or None."""
        return self._matched

    def feed(self, piece: str, may_end: bool = True) -> tuple[str, bool]:
        """Takes the next piece.  may_end: whether a stop string may end in it.

        Returns the text that surely precedes any stop string, and whether a stop string is complete.
        """
        if self._matched is not None:
            return "", True
        text = self._held + piece
        old = len(self._held)  # a stop string ends after these characters
        places = ((text.find(stop, max(0, old + 1 - len(stop))), stop) for stop in self._stops)
        if may_end and (found := [(at + len(stop), at, stop) for at, stop in places if at >= 0]):
            _, start, self._matched = min(found)
            self._held = ""
            return text[:start], True
        keep = self._possible_start(text)
        emit, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return emit, False

    def finish(self) -> str:
        """Ends the text and returns the part that was held back."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
