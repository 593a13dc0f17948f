"""The dialect of Qwen3-Coder and Qwen3.5: <function=NAME> with <parameter=NAME> values between <tool_call> tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specengine.tool_calls import hermes
from specengine.tool_calls.call_grammar import CallGrammar, FunctionSchema
from specengine.tool_calls.events import Arguments, Parsing, ToolStart
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_pieces import SPACES
from specengine.tool_calls.lark_writer import LarkWriter, either, quote
from specengine.tool_calls.parameter_types import allowed_values, followed, is_text, parameter_types, typed_value
from specengine.tool_calls.several_calls import skip_closers

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
CLOSERS = (CLOSE, END_FUNCTION, END_PARAMETER)
# Models forget the bracket of a tag.
_OPEN_CLOSERS = _CLOSE, _END_FUNCTION, _END_PARAMETER = CLOSE[:-1], END_FUNCTION[:-1], END_PARAMETER[:-1]
_VALUE_ENDS = tuple(space + tag for tag in (OPEN, PARAMETER, *_OPEN_CLOSERS) for space in ("\n", ""))
_AROUND_NAMES = SPACES + "\"'"


def parse_call(text: GrowingText, tag: str, tools: Mapping[str, Any], strict: bool) -> Parsing[bool]:
    """Reads one call after <tool_call>, or after <function= where a model forgets the outer tag.

    Of a malformed call it keeps every parameter that has a name. A call in JSON to one of the tools, the form of other
    Qwen models, counts too.
    """
    if tag == OPEN:
        yield from text.skip(SPACES)
        if not (yield from text.accept(FUNCTION)):
            return (yield from hermes.parse_call(text, tag, tools, True))
    name, closed = yield from _read_name(text)
    if not name or (name not in tools and (strict or tag == FUNCTION or not closed)):
        return False
    if tag == FUNCTION and not (yield from _follows(text, (PARAMETER, _END_FUNCTION, ""))):
        return False
    yield ToolStart(name)
    yield from _parse_parameters(text, tools.get(name))
    yield from skip_closers(text, _OPEN_CLOSERS)
    return True


def _read_name(text: GrowingText) -> Parsing[tuple[str, bool]]:
    """Reads the name in a tag, and returns it and whether the tag is closed. A name that the end cuts is none."""
    name = yield from text.take_until("<>\n")
    closed = yield from text.accept(">")
    whole = closed or (yield from text.next_char())
    return name.strip(_AROUND_NAMES) if whole else "", closed


def _parse_parameters(text: GrowingText, schema: Any) -> Parsing[None]:
    opening = "{"
    while (tag := (yield from _next_tag(text))) in (PARAMETER, _END_PARAMETER):
        if tag == PARAMETER:
            key, closed = yield from _read_name(text)
            if key and closed:
                yield Arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
                opening = ", "
                yield from _parse_value(text, schema, key)
    if tag or not text.is_cut:
        yield Arguments("{}" if opening == "{" else "}")


def _next_tag(text: GrowingText) -> Parsing[str]:
    """Reads the next tag of this call and the text before it. Returns "" where the call has none, and reads nothing."""
    pieces: list[str] = []
    start = text.keep()
    tag = yield from text.stream_until(
        (OPEN, FUNCTION, PARAMETER, *_OPEN_CLOSERS), lambda piece, _: pieces.append(piece), True
    )
    if tag in (OPEN, FUNCTION) or (not tag and "".join(pieces).strip()):
        text.rewind(start)
        tag = ""
    text.release()
    if tag in _OPEN_CLOSERS:
        yield from text.accept(">")
    if tag == _END_FUNCTION and (yield from _follows(text, (PARAMETER,))):  # it was closed too early
        return _END_PARAMETER
    return tag


def _parse_value(text: GrowingText, schema: Any, key: str) -> Parsing[None]:
    """Yields a value as JSON: a string piece by piece, a value of another type when it is complete."""
    yield from text.accept("\n")
    if is_text(schema, key):
        yield Arguments('"')
        if (yield from _stream_value(text, schema, None)):
            yield Arguments('"')
        return
    pieces: list[str] = []
    if (yield from _stream_value(text, schema, pieces)):
        yield Arguments(typed_value(schema, key, "".join(pieces)))


def _stream_value(text: GrowingText, schema: Any, pieces: list[str] | None) -> Parsing[bool]:
    """Reads a value and its closing tag; another tag that ends it stays. Returns whether it is complete.

    A tag that does not end the value is part of it.  pieces: takes the text; None: it is yielded.
    """

    def escaped(piece: str, _: int = 0) -> Arguments | None:
        if pieces is None:
            return Arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
        pieces.append(piece)
        return None

    while tag := (yield from text.stream_until(_VALUE_ENDS, escaped, drop_cut=True)):
        text.rewind(text.position - len(tag))
        start = text.keep()
        yield from text.accept(tag)
        read = text.position
        ends = yield from _ends_value(text, tag.strip(), schema)
        text.rewind(start if ends and tag.strip() != _END_PARAMETER else read)
        text.release()
        if ends:
            yield from text.accept(">")
            return True
        if event := escaped(tag):
            yield event
    return not text.is_cut


def _ends_value(text: GrowingText, tag: str, schema: Any) -> Parsing[bool]:
    """Returns whether a tag that was read ends the value before it. Reads on, for the caller to return."""
    if tag in _OPEN_CLOSERS and not (yield from text.accept(">")):
        char = yield from text.next_char()
        if char and char not in SPACES + "<":
            return False
    if tag == _END_PARAMETER and (yield from _follows(text, (OPEN, FUNCTION, PARAMETER, *_OPEN_CLOSERS, ""))):
        return True
    if tag == PARAMETER:
        key, closed = yield from _read_name(text)
        known = schema.get("properties") if isinstance(schema, dict) else None
        return bool(key and closed and (not isinstance(known, dict) or not known or key in known))
    if tag == OPEN:
        return (yield from _follows(text, (FUNCTION,)))
    if tag == _END_FUNCTION and (yield from _follows(text, (_CLOSE, ""))):
        return True
    if tag != _END_PARAMETER:
        return (yield from text.look_for((_END_PARAMETER, OPEN, FUNCTION))) != _END_PARAMETER
    found = yield from text.look_for((_END_PARAMETER, OPEN, FUNCTION, PARAMETER))
    if not found and text.was_cut:
        found = (yield from text.look_for((_END_FUNCTION, _CLOSE))) or _END_PARAMETER
    return found != _END_PARAMETER


def _follows(text: GrowingText, tags: Sequence[str]) -> Parsing[bool]:
    """Returns whether one of the tags follows, after space.  "": the end of the text, which may cut a tag."""
    start = text.keep()
    yield from text.skip(SPACES)
    found = False
    for tag in filter(None, tags):
        found = found or (yield from text.accept_cut(tag))
    found = found or ("" in tags and not (yield from text.next_char()))
    text.rewind(start)
    text.release()
    return found


def write_calls(writer: LarkWriter, functions: Sequence[FunctionSchema]) -> CallGrammar:
    """Writes the grammar of calls. See Dialect.write_calls.

    Parameters come in the order of the schema, and after them any others where the schema leaves these open. Of a
    string only its enum is enforced, as it stands unquoted.
    """
    bodies = either(f"{quote(each.name + '>')} {_write_parameters(writer, each.schema)}" for each in functions)
    head, tail = quote("\n" + FUNCTION), quote("\n" + END_FUNCTION + "\n")
    return CallGrammar(f"{head} {bodies} {tail} {writer.tag(CLOSE)}", separator='"\\n"')


def _write_parameters(writer: LarkWriter, schema: Mapping[str, Any]) -> str:
    schema = followed(schema)
    required = schema.get("required") or ()
    keys = dict.fromkeys([*(schema.get("properties") or ()), *required])
    parts = []
    for key in keys:
        opening = quote(f"\n{PARAMETER}{key}>\n")
        part = f"{opening} {_write_value(writer, schema, key)}"
        parts.append(part if key in required else f"({part})?")
    if schema.get("additionalProperties", True) is True and "patternProperties" not in schema:
        name = writer.other_than(r"[^<>\s]+", keys)
        opening, end = quote("\n" + PARAMETER), quote(">\n")
        parts.append(f"({opening} {name} {end} {_write_text(writer)})*")
    return " ".join(parts)


def _write_text(writer: LarkWriter) -> str:
    """Returns an expression for a value as text, without tags at which the parser might end it, and its closing tag."""
    return writer.text_until("\n" + END_PARAMETER, [OPEN, PARAMETER, *_OPEN_CLOSERS])


def _write_value(writer: LarkWriter, schema: Mapping[str, Any], key: str) -> str:
    end = "\n" + END_PARAMETER
    own: Any = (schema.get("properties") or {}).get(key)
    values = allowed_values(own, schema)
    if values is not None:
        texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
        return f"{either(map(quote, texts))} {quote(end)}"
    types = parameter_types(schema, key)
    if not types or "string" in types:
        return _write_text(writer)
    root = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    return f"{writer.json({**root, **own})} {quote(end)}"
