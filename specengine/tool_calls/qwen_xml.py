"""The dialect of Qwen3-Coder and Qwen3.5: <function=NAME> with <parameter=NAME> values between <tool_call> tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specengine.tool_calls.call_grammar import CallGrammar, FunctionSchema
from specengine.tool_calls.events import Arguments, Parsing, ToolStart
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_pieces import SPACES
from specengine.tool_calls.lark_writer import LarkWriter, either, quote
from specengine.tool_calls.parameter_types import allowed_values, is_text, parameter_types, typed_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


def parse_call(text: GrowingText, tag: str, tools: Mapping[str, Any], strict: bool) -> Parsing[bool]:
    """Reads one call behind <tool_call>, or behind <function= where a model forgets the outer tag."""
    if tag == OPEN:
        yield from text.skip(SPACES)
        if not (yield from text.accept(FUNCTION)):
            return False
    name = yield from text.take_until("<>\n")
    if not name or not (yield from text.accept(">")) or ((strict or tag == FUNCTION) and name not in tools):
        return False
    yield ToolStart(name)
    yield from _parse_parameters(text, tools.get(name))
    yield from text.skip(SPACES)
    yield from text.accept(CLOSE)
    return True


def _parse_parameters(text: GrowingText, schema: Any) -> Parsing[None]:
    opening = "{"
    while True:
        yield from text.skip(SPACES)
        if not (yield from text.accept(PARAMETER)):
            break
        key = yield from text.take_until("<>\n")
        if not (yield from text.accept(">")):
            break
        yield Arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        yield from _parse_value(text, schema, key)
    closed = yield from text.accept(END_FUNCTION)
    if closed or (yield from text.next_char()):  # a call that the token limit cuts keeps incomplete arguments
        yield Arguments("{}" if opening == "{" else "}")


def _parse_value(text: GrowingText, schema: Any, key: str) -> Parsing[None]:
    """Yields a value as JSON: a string piece by piece, a value of another type when it is complete."""
    yield from text.accept("\n")
    if is_text(schema, key):
        yield Arguments('"')
        ended = yield from _stream_value(text, None)
        if ended:
            yield Arguments('"')
        return
    pieces: list[str] = []
    if (yield from _stream_value(text, pieces)):
        yield Arguments(typed_value(schema, key, "".join(pieces)))


def _stream_value(text: GrowingText, pieces: list[str] | None) -> Parsing[bool]:
    """Reads a value and its closing tag. Returns whether the tag came.

    A closing tag counts only if the call goes on or ends behind it. Others are part of the value.
    """

    def escaped(piece: str, _: int = 0) -> Arguments | None:
        if pieces is None:
            return Arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
        pieces.append(piece)
        return None

    while tag := (yield from text.stream_until(("\n" + END_PARAMETER, END_PARAMETER), escaped)):
        start = text.keep()
        ends = yield from _call_goes_on(text)
        text.rewind(start)
        text.release()
        if ends:
            return True
        if event := escaped(tag):
            yield event
    return False


def _call_goes_on(text: GrowingText) -> Parsing[bool]:
    yield from text.skip(SPACES)
    for tag in (PARAMETER, END_FUNCTION, CLOSE):
        if (yield from text.accept(tag)):
            return True
    return not (yield from text.next_char())


def write_calls(writer: LarkWriter, functions: Sequence[FunctionSchema]) -> CallGrammar:
    """Writes the grammar of calls. See Dialect.write_calls.

    Parameters come in the order of the schema. Of a string only its enum is enforced, as it stands unquoted.
    """
    bodies = either(f"{quote(each.name + '>')} {_write_parameters(writer, each.schema)}" for each in functions)
    head, tail = quote("\n" + FUNCTION), quote("\n" + END_FUNCTION + "\n")
    return CallGrammar(f"{head} {bodies} {tail} {writer.tag(CLOSE)}", separator='"\\n"')


def _write_parameters(writer: LarkWriter, schema: Mapping[str, Any]) -> str:
    required = schema.get("required") or ()
    parts = []
    for key in schema.get("properties") or {}:
        opening = quote(f"\n{PARAMETER}{key}>\n")
        part = f"{opening} {_write_value(writer, schema, key)}"
        parts.append(part if key in required else f"({part})?")
    return " ".join(parts)


def _write_value(writer: LarkWriter, schema: Mapping[str, Any], key: str) -> str:
    end = "\n" + END_PARAMETER
    own = schema["properties"][key]
    values = allowed_values(own, schema)
    if values is not None:
        texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
        return f"{either(map(quote, texts))} {quote(end)}"
    types = parameter_types(schema, key)
    if not types or "string" in types:
        return writer.text_until(end, [END_PARAMETER])
    root = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return f"{writer.json({**root, **own})} {quote(end)}"
