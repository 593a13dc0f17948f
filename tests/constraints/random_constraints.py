"""Constraints drawn at random, with the check of a text that an independent validator makes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema

from specengine import SamplingParams

SCHEMAS = Path(__file__).parents[2] / "specengine" / "bench" / "data" / "schemas.jsonl"
KEYS = ("name", "age", "id", "list of things", "größe", "名前", 'a "quoted" key', "x", "value_1", "is_open", "path\\to")
WORDS = ("red", "green", "Paris", "yes", "no", "ok, then", "é", "🦙", "12", "")
# Behind an emoji the tokenizer cuts "'s" in two; the rest of the text alone it would not.
LITERALS = ("the", "a b", "x=1", "(ok)", "no.", "12", "é", "😀's", "'t")
PATTERNS = (
    r"^[a-z]{1,8}$",
    r"^\d{4}-\d{2}-\d{2}$",
    r"^[A-Z][a-z]*( [A-Z][a-z]*)?$",
    r"^(ab|cd){1,3}$",
    r"^[0-9a-f]{8}$",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def fixed_schemas() -> list[dict[str, Any]]:
    """Sixty schemas of agents, with a prompt each: lines of a file of questions."""
    return [json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose values are short."""
    leaf = (_string, _string, _integer, _number, _choice, _simple)
    inner = (_object, _object, _array, _union) if depth else ()
    return rng.choice((*leaf, *inner, *inner))(rng, depth - 1)


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """An expression of the syntax that Python and Rust share."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(5 if depth else 3)
        if kind == 0:
            part = re.escape(rng.choice(LITERALS))
        elif kind <= 2:
            part = rng.choice(("[a-z]", "[A-Z0-9]", "[^a-z\\n]", "[a-c]", "[0-9]", ".", "[ ,]"))
        else:
            part = f"({'|'.join(random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3)))})"
        if kind:
            part += rng.choice(("", "", "?", "{2}", "{1,4}", "{0,3}", "*" if rng.random() < 0.2 else ""))
        parts.append(part)
    return "".join(parts)


def random_constraint(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A prompt, and a constraint as arguments of SamplingParams."""
    kind = rng.random()
    if kind < 0.35:
        question = rng.choice(fixed_schemas())
        return question["turns"][0], {"json_schema": question["json_schema"]}
    prompt = rng.choice(
        ("Give me an example.", "Answer in JSON.", "Describe Alice.", "What is the weather?", "List three.")
    )
    if kind < 0.7:
        return prompt, {"json_schema": random_schema(rng)}
    if kind < 0.95:
        return prompt, {"regex": random_regex(rng)}
    return prompt, {"choices": rng.sample([word for word in WORDS if word], rng.randint(1, 4))}


def problem(text: str, params: SamplingParams) -> str | None:
    """Returns what is wrong with a finished text; None for a valid one."""
    if params.regex is not None:
        return None if re.fullmatch(params.regex, text) else "does not match"
    if params.choices is not None:
        return None if text in params.choices else "is no choice"
    try:
        value = json.loads(text, parse_float=Decimal)  # a text may have more digits than a float
        schema = json.loads(params.json_schema)
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.2:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind < 0.35:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(25)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 9, 1000, 10**6))}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.choice((-1.5, 0, 3, 10))
    return {
        "type": "number",
        rng.choice(("minimum", "exclusiveMinimum")): low,
        "maximum": low + rng.choice((1, 2.5, 100)),
    }


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [*WORDS, 1, -2.5, True, None, ["a", 1], {"k": "v"}]
    return {"enum": rng.sample(values, rng.randint(1, 4))} if rng.random() < 0.8 else {"const": rng.choice(values)}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    return {
        "type": "array",
        "items": random_schema(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randrange(3),
    }


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(KEYS, rng.randint(1, 4))
    required = keys if rng.random() < 0.7 else [key for key in keys if rng.random() < 0.5]
    properties: Mapping[str, Any] = {key: random_schema(rng, depth) for key in keys}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth) for _ in range(rng.randint(2, 3))]}
