"""Valid JSON from what a model writes as JSON, while it writes it."""

from __future__ import annotations

import json
import re
import string

from specengine.tool_calls.events import Arguments, Parsing
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_pieces import SPACES

_CONTROL = "".join(map(chr, range(0x20)))
_ESCAPED = '"\\/bfnrt'
_WORD_ENDS = ',{}[]"<\n'
_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def stream_json(text: GrowingText) -> Parsing[None]:
    """Reads an object, a list, a string or a word, and yields its JSON text. Valid JSON stays as it is.

    Mended are control characters and unknown escapes in strings, missing and additional commas and brackets, keys
    without a value, words without quotes, and Python's quotes and constants.
    A value ends before `<`, which JSON has only in strings: there a tag begins. It stays incomplete if the text is cut.
    """
    yield from _Repair(text).read()


def repair_json(text: str, complete: bool = True) -> str:
    """Returns what stream_json yields for a whole text.  complete: close a value that the end of the text cuts."""
    growing = GrowingText()
    growing.feed(text)
    growing.end(complete)
    return "".join(event.text for event in stream_json(growing) if isinstance(event, Arguments))


class _Repair:
    """Reads one value. Space and commas are held back until something follows them.

    _closers: the brackets that the open objects and lists need, the innermost last.
    _expected: `value`, `key`, `colon`, or `next` where an element is complete.
    """

    def __init__(self, text: GrowingText) -> None:
        self._text = text
        self._closers: list[str] = []
        self._expected = "value"
        self._gap = ""

    def read(self) -> Parsing[None]:
        while self._closers or self._expected != "next":
            char = yield from self._text.next_char()
            if not char or char == "<" or (char in "]}" and not self._closes(char)):
                break
            if char in SPACES:
                self._gap += self._text.read_run_of(SPACES)
            elif char == ",":
                yield from self._text.accept(char)
                yield from self._end_element()
                if self._expected == "next":
                    self._gap += char
                    self._expect_element()
            elif char in "]}":
                yield from self._text.accept(char)
                while self._closers[-1] != char:
                    yield from self._close()
                yield from self._close()
            else:
                yield from self._read_part(char)
        while self._closers and not self._text.is_cut:
            yield from self._close()

    def _closes(self, char: str) -> bool:
        return char in self._closers[-1:] or char in self._closers

    def _read_part(self, char: str) -> Parsing[None]:
        """Reads a key, a colon, or a value or its opening bracket. Adds what is missing before it."""
        if self._expected == "next" and char != ":":
            self._gap = "," + self._gap
            self._expect_element()
        if char == ":" or (self._expected == "key" and char in "{["):
            yield from self._text.accept(char)
            if self._expected == "colon":
                yield self._write(":")
                self._expected = "value"
            return
        if self._expected == "colon":
            yield self._write(":")
            self._expected = "value"
        if char in "{[":
            yield from self._text.accept(char)
            yield self._write(char)
            self._closers.append("}" if char == "{" else "]")
            self._expect_element()
            return
        if char in "\"'":
            yield from self._read_string(char)
        else:
            yield from self._read_word()
        self._expected = "colon" if self._expected == "key" else "next"

    def _expect_element(self) -> None:
        self._expected = "key" if self._closers[-1:] == ["}"] else "value"

    def _end_element(self) -> Parsing[None]:
        """Gives a key without a value one."""
        if self._expected == "colon" or (self._expected == "value" and self._closers[-1] == "}"):
            yield Arguments(": null" if self._expected == "colon" else "null")
            self._expected = "next"

    def _close(self) -> Parsing[None]:
        self._gap = self._gap.replace(",", "")
        yield from self._end_element()
        yield self._write(self._closers.pop())
        self._expected = "next"

    def _read_string(self, quote: str) -> Parsing[None]:
        stops = f'"\\{quote}{_CONTROL}'
        yield from self._text.accept(quote)
        yield self._write('"')
        while char := (yield from self._text.next_char()):
            if char not in stops:
                yield Arguments(self._text.read_run(stops))
                continue
            yield from self._text.accept(char)
            if char == quote:
                yield Arguments('"')
                return
            yield Arguments((yield from self._read_escape()) if char == "\\" else _quote(char)[1:-1])
        if not self._text.is_cut:
            yield Arguments('"')

    def _read_escape(self) -> Parsing[str]:
        """Reads what follows a backslash and returns its escape: nothing if the end cuts it."""
        char = yield from self._text.next_char()
        yield from self._text.accept(char)
        if char == "u":
            digits = ""
            while len(digits) < 4 and (digit := (yield from self._text.next_char())):
                if digit not in string.hexdigits:
                    return f"\\\\u{digits}"
                yield from self._text.accept(digit)
                digits += digit
            return f"\\u{digits}" if len(digits) == 4 else ""
        if not char or char == "'":
            return char
        return f"\\{char}" if char in _ESCAPED else f"\\\\{_quote(char)[1:-1]}"

    def _read_word(self) -> Parsing[None]:
        raw = yield from self._text.take_until(_WORD_ENDS + (":" if self._expected == "key" else ""))
        if self._text.is_cut:
            return
        word = raw.rstrip(SPACES)
        written = _PYTHON.get(word, word)
        is_literal = self._expected == "value" and _LITERAL.fullmatch(written)
        yield self._write(written if is_literal else _quote(word))
        self._gap = raw[len(word) :]

    def _write(self, text: str) -> Arguments:
        gap, self._gap = self._gap, ""
        return Arguments(gap + text)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
