"""JSON values in a growing text. Only brackets and quotes are read, because a model may write invalid JSON."""

from __future__ import annotations

import json

from specengine.tool_calls.events import Arguments, Parsing
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
    """Reads a value and returns its JSON text; the text is incomplete if the value is."""
    pieces: list[str] = []
    yield from _walk_value(text, pieces)
    return "".join(pieces)


def stream_arguments(text: GrowingText) -> Parsing[None]:
    """Yields the value of `arguments`, as pieces of the JSON text of an object.

    Some models write the object as a JSON string, or write null for no arguments.
    """
    if (yield from text.next_char()) == "{":
        yield from _walk_value(text, None)
        return
    value = yield from read_value(text)
    if value or (yield from text.next_char()):
        yield Arguments(as_object(value))


def as_object(value: str) -> str:
    """Returns the JSON text of an object, given its JSON text or the JSON text of a string that holds it."""
    if value.startswith('"'):
        try:
            inner = json.loads(value, strict=False).strip()
        except ValueError:
            return value
        if not inner or inner.startswith("{"):
            value = inner
    return "{}" if value in ("", "null") else value


def _walk_value(text: GrowingText, pieces: list[str] | None) -> Parsing[None]:
    """Reads a value. Appends its pieces to a list, or yields them as events if there is none.

    A value ends early before `<`, which JSON has only in strings: there a tag begins, and brackets are missing.
    """
    depth = 0
    quoted = False
    while char := (yield from text.next_char()):
        stops = _IN_STRING if quoted else _IN_OBJECT if depth else _OUTSIDE
        if char not in stops:
            piece = text.read_run(stops)
        elif not quoted and (char not in '"{}[]' or (char in "}]" and not depth)):
            return
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
        if pieces is None:
            yield Arguments(piece)
        else:
            pieces.append(piece)
        if not depth and not quoted and char in '"}]':
            return
