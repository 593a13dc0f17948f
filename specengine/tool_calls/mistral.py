"""The dialect of Mistral: [TOOL_CALLS], then a JSON list of calls, or name[ARGS]{...} for each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from specengine.tool_calls.call_grammar import CallGrammar, FunctionSchema, json_calls
from specengine.tool_calls.events import Parsing, ToolStart
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_arguments import stream_arguments
from specengine.tool_calls.json_call import parse_json_calls
from specengine.tool_calls.json_pieces import SPACES
from specengine.tool_calls.lark_writer import LarkWriter, either, quote
from specengine.tool_calls.several_calls import parse_more

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def parse_call(text: GrowingText, tag: str, tools: Mapping[str, Any], strict: bool) -> Parsing[bool]:
    """Reads the calls behind one tag. See Dialect.parse_call."""
    if not (yield from _parse_calls(text, tools if strict else None)):
        return False
    yield from parse_more(text, partial(_parse_calls, text, tools))  # text may follow too
    return True


def _parse_calls(text: GrowingText, names: Mapping[str, Any] | None) -> Parsing[bool]:
    yield from text.skip(SPACES)
    if (yield from text.next_char()) in ("[", "{"):
        return (yield from parse_json_calls(text, names))
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
    yield from text.skip("}")  # as in a call that is an object
    return True


def write_list(writer: LarkWriter, functions: Sequence[FunctionSchema]) -> CallGrammar:
    """Writes the grammar of a JSON list of calls. See Dialect.write_calls."""
    call = writer.rule(json_calls(writer, functions, "arguments"))
    return CallGrammar(f'"[" {call} "]"', f'"[" {call} (", " {call})* "]"')


def write_named_calls(writer: LarkWriter, functions: Sequence[FunctionSchema]) -> CallGrammar:
    """Writes the grammar of calls as name[ARGS]{...}. See Dialect.write_calls."""
    args = writer.tag(ARGS)
    return CallGrammar(either(f"{quote(each.name)} {args} {writer.json(each.schema)}" for each in functions))
