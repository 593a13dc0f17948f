"""Types of request fields that accept several kinds of values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

MAX_STOPS = 64


def make_error(message: str) -> PydanticCustomError:
    """Makes a validation error with exactly this message."""
    return PydanticCustomError("request", "{message}", {"message": message})


def _parse_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise make_error("expected a non-empty string, or a list of them")
    if len(stops) > MAX_STOPS:
        raise make_error(f"expected at most {MAX_STOPS} strings, got {len(stops)}")
    return tuple(stops)


Stop = Annotated[tuple[str, ...], BeforeValidator(_parse_stop)]


def _join_text_parts(content: Any, info: ValidationInfo) -> str:
    """Returns the text of a message, whose content is a string or a list of parts, perhaps of none."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise make_error("expected a string, or a list of parts {'type': 'text', 'text': ...}")
    return "".join(_read_part(part, f"part {number}", info.context) for number, part in enumerate(content))


def _read_part(part: Any, name: str, unknown: Any) -> str:
    """Returns the text of a part.  unknown: see parse_body."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise make_error(f"{name}: expected an object with the key 'type'")
    if kind not in ("text", "refusal"):
        raise make_error(f"{name}: type {kind[:40]!r} is not supported; this model reads text only")
    text = part.get(kind)
    if not isinstance(text, str):
        raise make_error(f"{name}: expected {{'type': {kind!r}, {kind!r}: ...}} with a string")
    for key in part.keys() - {"type", kind, "cache_control"}:
        if part[key] is not None and unknown is None:
            raise make_error(f"{name}: {key[:40]!r} is not a key of a part")
        if part[key] is not None:
            unknown.ignore(key)
    return text


Text = Annotated[str, BeforeValidator(_join_text_parts)]


def _parse_prompts(value: Any) -> Any:
    """Returns a list whose entries are strings or lists of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise make_error("expected a string, a list of token ids, or a non-empty list of those")
    for number, prompt in enumerate(value):
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_id, prompt))):
            raise make_error(f"prompt {number}: expected a string or a list of token ids")
    return value


Prompts = Annotated[list[Any], BeforeValidator(_parse_prompts)]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_logit_bias(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(key.isdecimal() and len(key) < 10 for key in value):
        raise make_error("expected an object whose keys are token ids")
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise make_error(f"token id {key}: expected a number from -100 to 100")
    return {int(key): bias for key, bias in value.items()}


LogitBias = Annotated[dict[int, float] | None, BeforeValidator(_parse_logit_bias)]


def _drop_fraction(value: Any) -> Any:
    """Returns 5 for 5.0: JSON does not tell integers from other numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_drop_fraction)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
Count = Annotated[Integer | None, Field(ge=1, le=2**31 - 1)]
