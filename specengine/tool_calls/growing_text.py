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
        self._complete = False

    @property
    def position(self) -> int:
        """The number of characters that were read."""
        return self._dropped + self._at

    @property
    def decided(self) -> int:
        """The number of characters that were read and will not be read again."""
        return min(self.position, *self._kept) if self._kept else self.position

    @property
    def was_cut(self) -> bool:
        """Whether the text has ended, but not by its writer."""
        return self._ended and not self._complete

    @property
    def is_cut(self) -> bool:
        """Whether everything was read of a text that was cut."""
        return self.was_cut and self._at == len(self._text)

    def feed(self, piece: str) -> None:
        """Adds text at the end."""
        start = self.decided - self._dropped
        self._text = self._text[start:] + piece
        self._at -= start
        self._dropped += start

    def end(self, complete: bool = False) -> None:
        """Says that no more text follows.  complete: because its writer ended it."""
        self._ended, self._complete = True, complete

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

    def attempt(self, parsing: Parsing[bool]) -> Parsing[bool]:
        """Runs a parser. Where it returns False, which it may do before its first event only, nothing is read."""
        start = self.keep()
        found = False
        for event in parsing:
            if event is not None and not found:
                found = True
                self.release()
            yield event
        if not found:
            self.rewind(start)
            self.release()
        return found

    def next_char(self) -> Parsing[str]:
        """Returns the next character without reading it, or the empty string at the end."""
        while self._at == len(self._text) and not self._ended:
            yield None
        return self._text[self._at : self._at + 1]

    def skip(self, characters: str) -> Parsing[None]:
        """Reads all next characters that are among these."""
        while (char := (yield from self.next_char())) and char in characters:
            self.read_run_of(characters)

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
        return self._read_to(next((i for i in range(self._at, len(self._text)) if self._text[i] in stops), None))

    def read_run_of(self, characters: str) -> str:
        """Reads the characters that have arrived and are among these. Does not wait."""
        return self._read_to(
            next((i for i in range(self._at, len(self._text)) if self._text[i] not in characters), None)
        )

    def _read_to(self, end: int | None) -> str:
        run = self._text[self._at : end]
        self._at += len(run)
        return run

    def take_until(self, stops: str) -> Parsing[str]:
        """Reads and returns the text before the first of these characters, or before the end."""
        pieces = []
        while (char := (yield from self.next_char())) and char not in stops:
            pieces.append(self.read_run(stops))
        return "".join(pieces)

    def look_for(self, tags: Sequence[str]) -> Parsing[str]:
        """Returns the first of the tags that follows, without reading it, or "" if none does before the end."""
        start = self.keep()
        found = yield from self.stream_until(tags, lambda piece, at: None)
        self.rewind(start)
        self.release()
        return found

    def stream_until(self, tags: Sequence[str], make: MakeEvent, drop_cut: bool = False) -> Parsing[str]:
        """Yields the text before the first of the tags, as events. Returns that tag, or "" at the end.

        make: makes an event of a piece and its position, or returns None for no event.
        drop_cut: reads the beginning of a tag at the end of the text without an event.
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
                    if not drop_cut and (event := make(piece, start)):
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
