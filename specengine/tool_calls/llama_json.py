"""The dialect of Llama 3: the answer is {"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from specengine.tool_calls.call_grammar import CallGrammar, FunctionSchema, json_calls
from specengine.tool_calls.events import Parsing
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_call import parse_json_call
from specengine.tool_calls.lark_writer import LarkWriter
from specengine.tool_calls.several_calls import parse_more

OPEN = "<|python_tag|>"


def parse_call(text: GrowingText, tag: str, tools: Mapping[str, Any], strict: bool) -> Parsing[bool]:
    """Reads the calls in a row. Without a tag only the name tells a call from an answer in JSON."""
    if not (yield from parse_json_call(text, tools)):
        return False
    yield from parse_more(text, partial(parse_json_call, text, tools))
    yield from text.accept(";")
    return True


def write_calls(writer: LarkWriter, functions: Sequence[FunctionSchema]) -> CallGrammar:
    """Writes the grammar of calls without a tag. See Dialect.write_calls."""
    call = writer.rule(json_calls(writer, functions, "parameters"))
    return CallGrammar(call, f'{call} ("; " {call})*')
