"""A call as a JSON object: {"name": ..., "arguments": {...}}. Hermes, Llama-3 and Mistral write calls so."""

from __future__ import annotations

from collections.abc import Container

from specengine.tool_calls.events import Arguments, Parsing, ToolStart
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_arguments import as_object, stream_arguments
from specengine.tool_calls.json_pieces import SPACES, read_string, read_value

_ARGUMENTS = ("arguments", "parameters")  # Llama-3 says parameters
_AFTER_JUNK = ("}", "{", "[", "<", ";")  # what may follow in place of a key


def parse_json_call(text: GrowingText, names: Container[str] | None = None) -> Parsing[bool]:
    """Reads a call and yields its events. Returns False, without an event, if there is none.

    names: the names that a call may have; None allows any.
    The order of the keys does not matter. A call that began ends where its JSON does, valid or not. Its arguments are
    valid.
    """
    yield from text.skip(SPACES)
    if not (yield from text.accept("{")):
        return False
    name: str | None = None
    early: str | None = None  # arguments that precede the name
    delivered = False
    while (char := (yield from text.next_char())) and char != "}":
        if char in SPACES + ",":
            yield from text.accept(char)
            continue
        key = yield from _read_key(text)
        if key == "name" and name is None:
            name = yield from read_string(text)
            if not name or (names is not None and name not in names):
                return False
            yield ToolStart(name)
            if early is not None:
                yield Arguments(early)
                delivered = True
        elif key in _ARGUMENTS and name is not None and not delivered:
            yield from stream_arguments(text)
            delivered = True
        elif key in _ARGUMENTS and early is None:
            early = as_object((yield from read_value(text)))
        elif key is None or (name is None and key not in ("id", "type")):
            if name is not None and (yield from text.look_for(_AFTER_JUNK)) in ("}", ""):
                yield from text.take_until("}")
            break
        else:
            yield from read_value(text)
    if name is None:
        return False
    if not delivered and not text.is_cut:
        yield Arguments("{}")
    # A model may close too many brackets, or separate calls by commas.
    yield from text.skip(SPACES + "}")
    return True


def parse_json_calls(text: GrowingText, names: Container[str] | None = None) -> Parsing[bool]:
    """Reads one call, or a list of them. Returns whether there is at least one."""
    yield from text.skip(SPACES)
    if not (yield from text.accept("[")):
        return (yield from parse_json_call(text, names))
    found = False
    while (yield from parse_json_call(text, names)):
        found = True
        yield from text.skip(SPACES + ",")
    yield from text.accept("]")
    return found


def _read_key(text: GrowingText) -> Parsing[str | None]:
    """Reads a key and its colon. Returns None where the JSON is no key."""
    key = yield from read_string(text)
    yield from text.skip(SPACES)
    if key is None or not (yield from text.accept(":")):
        return None
    yield from text.skip(SPACES)
    return key
