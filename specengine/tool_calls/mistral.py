"""The dialect of Mistral: [TOOL_CALLS], then a JSON list of calls, or name[ARGS]{...} for each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specengine.tool_calls.events import Parsing, ToolStart
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_call import parse_json_call
from specengine.tool_calls.json_pieces import SPACES, stream_arguments

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def parse_call(text: GrowingText, tag: str, tools: Mapping[str, Any], strict: bool) -> Parsing[bool]:
    """Reads the calls behind one tag. See Dialect.parse_call."""
    names = tools if strict else None
    yield from text.skip(SPACES)
    if not (yield from text.accept("[")):
        return (yield from _parse_named_call(text, names))
    found = False
    while (yield from parse_json_call(text, names)):
        found = True
        yield from text.skip(SPACES + ",")
    yield from text.accept("]")
    return found


def _parse_named_call(text: GrowingText, names: Mapping[str, Any] | None) -> Parsing[bool]:
    name = (yield from text.take_until("[{<" + SPACES)).strip()
    if not name or (names is not None and name not in names):
        return False
    if (yield from text.accept(CALL_ID)):
        yield from text.take_until("[{" + SPACES)
    yield from text.accept(ARGS)
    yield from text.skip(SPACES)
    if (yield from text.next_char()) != "{":
        return False
    yield ToolStart(name)
    yield from stream_arguments(text)
    return True
