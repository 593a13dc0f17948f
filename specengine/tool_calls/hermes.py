"""The dialect of Hermes, Qwen2.5 and Qwen3: JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from specengine.tool_calls.call_grammar import CallGrammar, FunctionSchema, json_calls
from specengine.tool_calls.events import Parsing
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_call import parse_json_calls
from specengine.tool_calls.lark_writer import LarkWriter
from specengine.tool_calls.several_calls import parse_more, skip_closers

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_call(text: GrowingText, tag: str, tools: Mapping[str, Any], strict: bool) -> Parsing[bool]:
    """Reads the call behind a tag, or a list of calls, which SmolLM2 writes. See Dialect.parse_call."""
    names = tools if strict else None
    if not (yield from parse_json_calls(text, names)):
        return False
    yield from parse_more(text, partial(parse_json_calls, text, names))
    yield from skip_closers(text, (CLOSE[:-1],))  # models may close a call twice
    return True


def write_calls(writer: LarkWriter, functions: Sequence[FunctionSchema]) -> CallGrammar:
    """Writes the grammar of calls. See Dialect.write_calls."""
    call = json_calls(writer, functions, "arguments")
    return CallGrammar(f'"\\n" {call} "\\n" {writer.tag(CLOSE)}', separator='"\\n"')
