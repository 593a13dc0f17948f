"""Schemas with every keyword that constraints hold, instances that fit or nearly fit them, and broken schemas."""

from __future__ import annotations

import copy
import random
from typing import Any

KEYS = (
    "a",
    "b",
    "c",
    "n",
    "x1",
    "x2",
    "y1",
    "größe",
    'a "b"',
    "new\nline",
    "del\x7f",
    "",
    "path/to~",
    "ctrl\x01",
    "🦙",
)
TEXTS = ("", "a", "ab", "abc", "aaaa", "red", "é", "🦙", "x1", "y12", "2024-02-29", "12:30:00Z", "a@b.co", "l\nm", 'q"')
WHOLE = (0, 1, -1, 2, 3, 7, 10, 12, 99, 100, -5, 10**6, 2**53, -(2**53), 10**18)
FRACTIONS = (0.5, -0.5, 1.5, 2.25, 0.1, -3.75, 1e-3, 12.125)
PATTERNS = ("^a", "b$", "^[a-z]+$", "^x[0-9]$", "^(ab|cd){1,3}$", "[0-9]", "^.{2,3}$", "^é?$", "^[^a]*$")
FORMATS = ("date", "email", "uuid", "ipv4", "nonsense", "password")  # that jsonschema checks, and unknown ones
KEY_PATTERNS = ("^x[0-9]$", "^y", "^z.*$")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class RandomSchemas:
    """Draws schemas whose definitions refer to each other."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def schema(self) -> dict[str, Any]:
        definitions = {name: self._node(2) for name in ("one", "two")}
        return {**self._node(3), "$defs": definitions}

    def _node(self, depth: int) -> Any:
        rng = self._rng
        kinds = [self._string, self._number, self._values, self._typed]
        if depth:
            kinds += [self._object] * 5 + [self._array, self._array, self._joined, self._joined, self._union]
        node = rng.choice(kinds)(depth - 1)
        if rng.random() < 0.1:
            node |= {"title": "x", "default": 5, "uniqueItems": False, "propertyNames": {"type": "string"}}
        return node

    def _inner(self, depth: int) -> Any:
        rng = self._rng
        if depth <= 0 or rng.random() < 0.2:
            return rng.choice((True, {}, {"type": "integer"}, {"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}))
        return self._node(depth)

    def _string(self, depth: int) -> dict[str, Any]:
        rng, node = self._rng, {"type": "string"}
        for key, value in (
            ("minLength", rng.randrange(3)),
            ("maxLength", rng.randrange(2, 6)),
            ("pattern", rng.choice(PATTERNS)),
            ("format", rng.choice(FORMATS)),
        ):
            if rng.random() < 0.3:
                node[key] = value
        return node

    def _number(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        node: dict[str, Any] = {"type": rng.choice(("integer", "number", ["integer", "null"]))}
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if rng.random() < 0.3:
                node[key] = rng.choice((*WHOLE[:11], *FRACTIONS) if rng.random() < 0.97 else (10**18, 2**63, 2**53 + 1))
        if rng.random() < 0.2:
            node["multipleOf"] = rng.choice((2, 3, 5, 0.5, 100))
        return node

    def _values(self, depth: int) -> dict[str, Any]:
        values = [None, True, False, *TEXTS, *WHOLE, *FRACTIONS, [], [1, "a"], {}, {"a": 1, "b": [None]}, {"é": "\x01"}]
        if self._rng.random() < 0.2:
            return {"const": self._rng.choice(values)}
        return {"enum": self._rng.sample(values, self._rng.randint(1, 4))}

    def _typed(self, depth: int) -> dict[str, Any]:
        return {"type": self._rng.choice((*TYPES, self._rng.sample(TYPES, 2)))}

    def _array(self, depth: int) -> dict[str, Any]:
        rng, node = self._rng, {"type": "array"}
        if rng.random() < 0.4:
            node["prefixItems"] = [self._inner(depth) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.7:
            node["items"] = rng.choice((False, self._inner(depth)))
        for key in ("minItems", "maxItems"):
            if rng.random() < 0.4:
                node[key] = rng.randrange(4)
        return node

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        node: dict[str, Any] = {} if rng.random() < 0.1 else {"type": "object"}
        if rng.random() < 0.8:
            node["properties"] = {key: self._inner(depth) for key in rng.sample(KEYS, rng.randint(0, 4))}
        if rng.random() < 0.6:
            node["required"] = [key for key in node.get("properties", KEYS[:2]) if rng.random() < 0.6]
        if rng.random() < 0.2:
            node["patternProperties"] = {key: self._inner(depth) for key in rng.sample(KEY_PATTERNS, rng.randint(1, 2))}
        if rng.random() < 0.5:
            node["additionalProperties"] = rng.choice((False, False, True, self._inner(depth)))
        if rng.random() < 0.1:
            node["minProperties"] = rng.choice((1, 1, len(node.get("required", ())), 2))
        if rng.random() < 0.1:
            node["maxProperties"] = rng.randrange(4)
        return self._shuffled(node)

    def _joined(self, depth: int) -> dict[str, Any]:
        node = self._object(depth) if self._rng.random() < 0.5 else {}
        parts = [self._rng.choice((self._object, self._object, self._number, self._string))(depth) for _ in range(2)]
        node["allOf"] = [*parts, {"$ref": "#/$defs/one"}] if self._rng.random() < 0.2 else parts
        return self._shuffled(node)

    def _union(self, depth: int) -> dict[str, Any]:
        node = self._object(depth) if self._rng.random() < 0.4 else {}
        key = "oneOf" if self._rng.random() < 0.1 else "anyOf"
        node[key] = [self._inner(depth) for _ in range(self._rng.randint(1, 3))]
        return self._shuffled(node)

    def _shuffled(self, node: dict[str, Any]) -> dict[str, Any]:
        return dict(self._rng.sample([*node.items()], len(node)))


JUNK: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        2.5,
        1e300,
        10**400,
        -(2**63),
        float("inf"),
        "",
        "(?=a)",
        "a{9999}",
        "#",
        "#/$defs/one",
    ),
    *("#/$defs/none", "https://x.org", "\ud800", [], {}, [[]], [None], [{}], {"": {}}, {"a": 5}, {"$ref": "#"}),
    *({"type": "string", "pattern": "(a"}, {"not": {}}, {"x-guidance": 5}, ["a", "a"], "object", ["object", "null"]),
)
KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "patternProperties", "items", "prefixItems", "allOf"),
    *("anyOf", "oneOf", "not", "if", "then", "enum", "const", "$ref", "$defs", "$anchor", "$id", "minimum", "pattern"),
    *("maximum", "multipleOf", "minLength", "maxLength", "minItems", "minProperties", "maxProperties", "format"),
    *("uniqueItems", "contains", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "x-guidance"),
    *("propertyNames", "exclusiveMinimum", "additionalItems", "$schema", "$dynamicRef", "default", "unknown"),
)


def broken(schema: Any, rng: random.Random) -> Any:
    """A schema with some of its parts replaced by others that mean nothing there."""
    for _ in range(rng.randint(1, 4)):
        places = [schema]
        for each in places:
            inner = each.values() if isinstance(each, dict) else each
            places += [value for value in inner if isinstance(value, dict | list) and value]
        place = rng.choice(places)
        value = copy.deepcopy(rng.choice(JUNK))
        if rng.random() < 0.05:
            for _ in range(rng.choice((50, 100, 300))):
                value = {rng.choice(("items", "not", "additionalProperties")): value}
        if isinstance(place, list):
            place[rng.randrange(len(place))] = value
        else:
            place[rng.choice((*KEYWORDS, *place))] = value
    return schema
