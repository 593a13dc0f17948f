"""The dialects in which models write tool calls, and which one a chat template asks for."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from specengine.tool_calls import hermes, llama_json, mistral, qwen_xml
from specengine.tool_calls.call_grammar import CallGrammar, FunctionSchema
from specengine.tool_calls.events import Parsing
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.lark_writer import LarkWriter

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

    openers: the tags that begin a call; grammars use the first.  markers: all texts that may be special tokens.
    write_calls: writes the grammar of the text behind an opening tag.
    closers: the tags that end calls and parts of them.
    bare: an answer may also begin with a call without a tag, and grammars have none.
    parallel: templates accept several calls in a message.  make_id: makes the id of a call.
    """

    name: str
    openers: tuple[str, ...]
    markers: tuple[str, ...]
    parse_call: ParseCall
    write_calls: Callable[[LarkWriter, Sequence[FunctionSchema]], CallGrammar]
    closers: tuple[str, ...] = ()
    bare: bool = False
    parallel: bool = True
    make_id: Callable[[], str] = _call_id


HERMES = Dialect(
    "hermes",
    (hermes.OPEN,),
    (hermes.OPEN, hermes.CLOSE),
    hermes.parse_call,
    hermes.write_calls,
    closers=(hermes.CLOSE,),
)
QWEN_XML = Dialect(
    "qwen-xml",
    (qwen_xml.OPEN, qwen_xml.FUNCTION),
    (qwen_xml.OPEN, qwen_xml.CLOSE),
    qwen_xml.parse_call,
    qwen_xml.write_calls,
    closers=qwen_xml.CLOSERS,
)
LLAMA_JSON = Dialect(
    "llama-json",
    (llama_json.OPEN,),
    (llama_json.OPEN,),
    llama_json.parse_call,
    llama_json.write_calls,
    bare=True,
    parallel=False,
)
_MISTRAL_MARKERS = (mistral.OPEN, mistral.CALL_ID, mistral.ARGS)
MISTRAL = Dialect(
    "mistral", (mistral.OPEN,), _MISTRAL_MARKERS, mistral.parse_call, mistral.write_list, make_id=_mistral_call_id
)
MISTRAL_ARGS = replace(MISTRAL, name="mistral-args", write_calls=mistral.write_named_calls)

DIALECTS = {dialect.name: dialect for dialect in (HERMES, QWEN_XML, LLAMA_JSON, MISTRAL, MISTRAL_ARGS)}

# Texts of a chat template that show its dialect; the first dialect whose texts all occur is the template's.
_SIGNS = (
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (QWEN_XML, ("<function=", "<parameter=")),
    (HERMES, ("<tool_call>", '"arguments"')),
    (LLAMA_JSON, ("<|start_header_id|>", '"parameters"')),
)


def detect_dialect(template: str) -> Dialect | None:
    """Returns the dialect of a chat template that reads `tools`, or None if it is unknown."""
    text = template.replace("\\", "")  # Jinja strings escape quotes
    return next((dialect for dialect, signs in _SIGNS if all(sign in text for sign in signs)), None)
