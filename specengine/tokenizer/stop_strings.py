"""Stop strings found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds where the first stop string is complete, whatever the borders between pieces.

    Of several stop strings the one that ends first wins, and of those ending together the longest, so the
    outcome depends on the text alone. Feed one token's text at a time to learn after which token the stop was
    complete.

    The strings are those of SamplingParams.stop, which has checked them.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matched

    def feed(self, piece: str) -> tuple[str, bool]:
        """Takes the next piece: (text now certain to stand before any stop, whether a stop is complete)."""
        if self._matched is not None:
            return "", True
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self._matched = min(found)
            self._held = ""
            return text[:start], True
        keep = self._possible_start(text)
        emit, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return emit, False

    def finish(self) -> str:
        """The text held back, now that no more follows."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
