"""JSON values in a growing text. Only brackets and quotes are read, because a model may write invalid JSON."""

from __future__ import annotations

import json

from specengine.tool_calls.events import Parsing
from specengine.tool_calls.growing_text import GrowingText

SPACES = " \t\r\n"
# Characters at which the meaning of what follows may change.
_IN_STRING = '"\\'
_IN_OBJECT = '"{}[]<'
_OUTSIDE = _IN_OBJECT + ",;" + SPACES


def read_string(text: GrowingText) -> Parsing[str | None]:
    """Reads a JSON string and returns its value. Returns None if there is none, or if it is unfinished or invalid."""
    if (yield from text.next_char()) != '"':
        return None
    raw = yield from read_value(text)
    try:
        return json.loads(raw, strict=False)
    except ValueError:
        return None


def read_value(text: GrowingText) -> Parsing[str]:
    """Reads a value and returns its JSON text; the text is incomplete if the value is.

    A value ends early before `<`, which JSON has only in strings: there a tag begins, and brackets are missing.
    """
    pieces: list[str] = []
    depth = 0
    quoted = False
    while char := (yield from text.next_char()):
        stops = _IN_STRING if quoted else _IN_OBJECT if depth else _OUTSIDE
        if char not in stops:
            piece = text.read_run(stops)
        elif not quoted and (char not in '"{}[]' or (char in "}]" and not depth)):
            break
        else:
            yield from text.accept(char)
            piece = char
        if piece == '"':
            quoted = not quoted
        elif piece == "\\":
            escaped = yield from text.next_char()
            yield from text.accept(escaped)
            piece += escaped
        elif not quoted and char in stops:
            depth += 1 if char in "{[" else -1
        pieces.append(piece)
        if not depth and not quoted and char in '"}]':
            break
    return "".join(pieces)
