"""The arguments of a call that is written as JSON."""

from __future__ import annotations

import json

from specengine.tool_calls.events import Arguments, Parsing
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_pieces import read_value
from specengine.tool_calls.json_repair import repair_json, stream_json


def stream_arguments(text: GrowingText) -> Parsing[None]:
    """Yields the value of `arguments`, as pieces of the JSON text of an object.

    Some models write the object as a JSON string, or write null for no arguments.
    """
    if (yield from text.next_char()) == "{":
        yield from stream_json(text)
        return
    value = yield from read_value(text)
    if value or not text.is_cut:
        yield Arguments(as_object(value, complete=not text.is_cut))


def as_object(value: str, complete: bool = True) -> str:
    """Returns the JSON text of an object, given its JSON text or the JSON text of a string that holds it.

    complete: close what the end of the text cuts.
    """
    written = repair_json(value, complete)
    if value.startswith('"'):
        inner = json.loads(repair_json(value)).strip()
        if inner.startswith("{"):
            return repair_json(inner, complete)
        written = inner and written
    return "{}" if complete and written in ("", "null") else written
