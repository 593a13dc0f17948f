"""Values that fit or nearly fit a schema, and texts of them that a constraint may or may not take."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from specengine.constraints.schema_nodes import SchemaDocument
from tests.constraints.random_schemas import FRACTIONS, KEYS, TEXTS, TYPES, WHOLE


class RandomInstances:
    """Draws values for one schema. Most of them fulfil it."""

    def __init__(self, schema: Any, rng: random.Random) -> None:
        self._document, self._rng = SchemaDocument(schema), rng

    def value(self) -> Any:
        return self._value(self._document.root, 4)

    def _value(self, node: Any, depth: int) -> Any:
        rng = self._rng
        if not isinstance(node, dict) or not {*node} - {"title", "default", "$defs"}:
            return rng.choice((None, True, "a", 3, -0.5, [], {}, {"a": 1}, [1, "b"]))
        if "const" in node or "enum" in node:
            return rng.choice(node.get("enum", [node.get("const")]))
        drawn = [self._value(each, depth - 1) for each in self._joined(node)] if depth else []
        if "properties" in node or not drawn:
            drawn.insert(rng.randrange(2), self._typed(node, depth))
        if all(isinstance(each, dict) for each in drawn):
            return {key: value for each in drawn for key, value in each.items()}
        return rng.choice(drawn)

    def _joined(self, node: dict[str, Any]) -> list[Any]:
        joined = [self._document.target(node["$ref"])] if "$ref" in node else []
        joined += node.get("allOf", [])
        return joined + [self._rng.choice(node[key]) for key in ("anyOf", "oneOf") if node.get(key)]

    def _typed(self, node: dict[str, Any], depth: int) -> Any:
        rng, named = self._rng, node.get("type", "object" if "properties" in node or "required" in node else TYPES)
        kind = named if isinstance(named, str) else rng.choice(named)
        if kind == "string":
            return rng.choice(TEXTS)
        if kind in ("integer", "number"):
            near = [node[key] + step for key in ("minimum", "maximum") if key in node for step in (-1, 0, 1)]
            return rng.choice([*WHOLE, *near, *(FRACTIONS if kind == "number" else ())])
        if kind == "array":
            count = rng.choice((node.get("minItems", 0), node.get("maxItems", 2), rng.randrange(4)))
            each = [*node.get("prefixItems", []), *[node.get("items", True)] * 5][:count]
            return [self._value(inner, depth - 1) for inner in each] if depth else []
        if kind == "object":
            return self._object(node, depth) if depth else {}
        return rng.choice((True, False)) if kind == "boolean" else None

    def _object(self, node: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, known = self._rng, node.get("properties", {})
        required = node.get("required", [])
        chosen = {key: each for key, each in known.items() if key in required or rng.random() < 0.5}
        chosen |= {key: node.get("additionalProperties", True) for key in required if key not in known}
        for pattern, inner in node.get("patternProperties", {}).items():
            if rng.random() < 0.7:
                chosen.setdefault({"^x": "x5", "^y": "yes", "^z": "z"}[pattern[:2]], inner)
        while node.get("additionalProperties") is not False and rng.random() < 0.5:
            chosen.setdefault(rng.choice(KEYS), node.get("additionalProperties", True))
        return {key: self._value(each, depth - 1) for key, each in chosen.items()}


def written(value: Any) -> str:
    """The form of JSON that constraints write."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def twisted(text: str, rng: random.Random) -> str:
    """Another spelling of a value, or of one that is a little different."""
    places = [
        found.span() for found in re.finditer(r'"(?:\\.|[^"\\])*"(?:: )?|-?[0-9.]+|true|false|null|[\[\]{}]|, ', text)
    ]
    start, end = rng.choice(places)
    piece = text[start:end]
    kind = rng.randrange(4)
    if piece.startswith('"') and kind == 0 and end - start > 2:  # a character spelled by its number
        at = rng.randrange(start + 1, text.index('"', start + 1) + (text[start + 1] == '"'))
        return f"{text[:at]}\\u{ord(text[at]) % 65536:04x}{text[at + 1 :]}" if text[at] not in '"\\' else text
    if kind == 1 and (keys := list(re.finditer(r'("[^"\\]*"): ("[^"\\]*"|[0-9.]+|\w+)', text))):  # a key that repeats
        found, value = rng.choice(keys), rng.choice(("1", '"a"', "null", "true", "-5", '"abc"'))
        return f"{text[: found.end()]}, {rng.choice((found[1], rng.choice(keys)[1]))}: {value}{text[found.end() :]}"
    other = rng.choice(("1", "2.5", "-3", "1e2", "1.0", "null", "true", '"a"', "[]", "{}", '{"a": 1}', "", '"x1": 1, '))
    return text[:start] + other + text[end:]
