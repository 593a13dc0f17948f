"""The dialect of Hermes, Qwen2.5 and Qwen3: JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specengine.tool_calls.events import Parsing
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_call import parse_json_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_call(text: GrowingText, tag: str, tools: Mapping[str, Any], strict: bool) -> Parsing[bool]:
    """Reads one call behind its opening tag. See Dialect.parse_call."""
    if not (yield from parse_json_call(text, tools if strict else None)):
        return False
    yield from text.accept(CLOSE)
    return True
