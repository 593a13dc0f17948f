"""The dialects in which models write tool calls, and which one a chat template asks for."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from specengine.tool_calls import hermes, llama_json, mistral, qwen_xml
from specengine.tool_calls.events import Parsing
from specengine.tool_calls.growing_text import GrowingText

_ALPHANUMERIC = string.ascii_letters + string.digits


class ParseCall(Protocol):
    """Reads the calls behind an opening tag and yields their events.

    tools: the JSON schema of each function's parameters, by name.  strict: accepts only names of these tools.
    Returns False, without an event, where no call begins; the caller then treats the tag as text.
    """

    def __call__(self, text: GrowingText, tag: str, tools: Mapping[str, Any], strict: bool) -> Parsing[bool]: ...


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_call_id() -> str:
    """Mistral's templates refuse ids that have not nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True)
class Dialect:
    """A way to write tool calls.

    openers: the tags that begin a call.  markers: all texts of the dialect that may be special tokens.
    bare: an answer may also begin with a call without a tag.  make_id: makes the id of a call.
    """

    name: str
    openers: tuple[str, ...]
    markers: tuple[str, ...]
    parse_call: ParseCall
    bare: bool = False
    make_id: Callable[[], str] = _call_id


HERMES = Dialect("hermes", (hermes.OPEN,), (hermes.OPEN, hermes.CLOSE), hermes.parse_call)
QWEN_XML = Dialect("qwen-xml", (qwen_xml.OPEN, qwen_xml.FUNCTION), (qwen_xml.OPEN, qwen_xml.CLOSE), qwen_xml.parse_call)
LLAMA_JSON = Dialect("llama-json", (llama_json.OPEN,), (llama_json.OPEN,), llama_json.parse_call, bare=True)
_MISTRAL_MARKERS = (mistral.OPEN, mistral.CALL_ID, mistral.ARGS)
MISTRAL = Dialect("mistral", (mistral.OPEN,), _MISTRAL_MARKERS, mistral.parse_call, make_id=_mistral_call_id)
MISTRAL_ARGS = Dialect("mistral-args", (mistral.OPEN,), _MISTRAL_MARKERS, mistral.parse_call, make_id=_mistral_call_id)

DIALECTS = {dialect.name: dialect for dialect in (HERMES, QWEN_XML, LLAMA_JSON, MISTRAL, MISTRAL_ARGS)}

# Texts of a chat template that show its dialect; the first dialect whose texts all occur is the template's.
_SIGNS = (
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (QWEN_XML, ("<function=", "<parameter=")),
    (HERMES, ("<tool_call>",)),
    (LLAMA_JSON, ("<|start_header_id|>", '"parameters"')),
)


def detect_dialect(template: str) -> Dialect | None:
    """Returns the dialect of a chat template that reads `tools`, or None if it is unknown."""
    return next((dialect for dialect, signs in _SIGNS if all(sign in template for sign in signs)), None)
