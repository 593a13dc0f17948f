"""A text that arrives in pieces. Parsers read it as if it were complete, and wait where it is not."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.tool_calls.events import MakeEvent, Parsing


class GrowingText:
    """Reads a text from its beginning. Every reading method is a generator that yields None while it waits.

    A method waits until the next characters decide its result, or until the text has ended. So no result depends on
    the pieces in which the text arrives.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._dropped = 0  # characters before _text[0]
        self._kept: list[int] = []  # positions to which rewind() may return
        self._ended = False

    @property
    def position(self) -> int:
        """The number of characters that were read."""
        return self._dropped + self._at

    def feed(self, piece: str) -> None:
        """Adds text at the end."""
        start = min(self.position, *self._kept) - self._dropped if self._kept else self._at
        self._text = self._text[start:] + piece
        self._at -= start
        self._dropped += start

    def end(self) -> None:
        """Says that no more text follows."""
        self._ended = True

    def keep(self) -> int:
        """Returns the position, and keeps the text behind it for rewind() until release()."""
        self._kept.append(self.position)
        return self.position

    def rewind(self, position: int) -> None:
        """Returns to a position that keep() returned."""
        self._at = position - self._dropped

    def release(self) -> None:
        """Ends the last keep()."""
        self._kept.pop()

    def next_char(self) -> Parsing[str]:
        """Returns the next character without reading it, or the empty string at the end."""
        while self._at == len(self._text) and not self._ended:
            yield None
        return self._text[self._at : self._at + 1]

    def skip(self, characters: str) -> Parsing[None]:
        """Reads all next characters that are among these."""
        while (char := (yield from self.next_char())) and char in characters:
            self._at += 1

    def accept(self, tag: str) -> Parsing[bool]:
        """Reads a tag, and returns whether the text continues with it."""
        while True:
            have = self._text[self._at : self._at + len(tag)]
            if have == tag:
                self._at += len(tag)
                return True
            if self._ended or not tag.startswith(have):
                return False
            yield None

    def accept_cut(self, tag: str) -> Parsing[bool]:
        """Reads a tag, or its beginning where the end of the text cuts it. Returns whether the whole tag came."""
        if (yield from self.accept(tag)):
            return True
        if tag.startswith(self._text[self._at :]):  # accept() waited for the end of the text
            self._at = len(self._text)
        return False

    def read_run(self, stops: str) -> str:
        """Reads the characters that have arrived, up to the first of `stops`. Does not wait."""
        end = next((i for i in range(self._at, len(self._text)) if self._text[i] in stops), len(self._text))
        run = self._text[self._at : end]
        self._at = end
        return run

    def take_until(self, stops: str) -> Parsing[str]:
        """Reads and returns the text before the first of these characters, or before the end."""
        pieces = []
        while (char := (yield from self.next_char())) and char not in stops:
            pieces.append(self.read_run(stops))
        return "".join(pieces)

    def stream_until(self, tags: Sequence[str], make: MakeEvent) -> Parsing[str]:
        """Yields the text before the first of the tags, as events. Returns that tag, or "" at the end.

        make: makes an event of a piece and its position, or returns None for no event.
        The tag is read too. No tag may begin with another one.
        """
        while True:
            found = [(at, tag) for tag in tags if (at := self._text.find(tag, self._at)) >= 0]
            at, tag = min(found, default=(len(self._text), ""))
            held = self._partial_tag(tags, at)
            if at - held > self._at:
                piece, start = self._text[self._at : at - held], self.position
                self._at = at - held
                if event := make(piece, start):
                    yield event
                continue  # the caller may have fed text meanwhile, so the search starts again
            if tag and not held:
                self._at += len(tag)
                return tag
            if self._ended:
                if held:
                    piece, start = self._text[self._at :], self.position
                    self._at = len(self._text)
                    if event := make(piece, start):
                        yield event
                return ""
            yield None

    def _partial_tag(self, tags: Sequence[str], end: int) -> int:
        """Returns how many characters before `end` may belong to a tag that the text does not complete yet."""
        if end < len(self._text):
            return 0
        longest = max(map(len, tags), default=0)
        for size in range(min(longest - 1, end - self._at), 0, -1):
            if any(tag.startswith(self._text[end - size :]) for tag in tags):
                return size
        return 0
