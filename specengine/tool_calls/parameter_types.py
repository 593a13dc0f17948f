"""The JSON types of a tool's parameters, for dialects that write values as plain text."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_PYTHON: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}
_DEPTH = 8  # of references and unions; a schema may refer to itself


def is_text(schema: Any, key: str) -> bool:
    """Returns whether a parameter is a string and nothing else. An unknown parameter is one."""
    return parameter_types(schema, key) in (set(), {"string"})


def typed_value(schema: Any, key: str, value: str) -> str:
    """Returns the JSON text of a parameter's value: of an allowed type if the text is such a value, else a string."""
    types = parameter_types(schema, key)
    for parse in (json.loads, ast.literal_eval):  # templates show values of earlier calls as Python spells them
        try:
            parsed = parse(value.strip())
            if not isinstance(parsed, str) and _fits(parsed, types):
                # NaN and Infinity are no JSON, so they stay strings.
                return json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return json.dumps(value, ensure_ascii=False)


def parameter_types(schema: Any, key: str) -> set[str]:
    """Returns the names of the types that a tool's JSON schema allows for a parameter; none if it says nothing."""
    schema = followed(schema) if isinstance(schema, dict) else {}
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, dict) else None
    return _types(own, schema, _DEPTH, set())


def followed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema of parameters with those that it only refers to."""
    for _ in range(_DEPTH):
        reference = schema.get("$ref")
        target = resolve(reference, schema) if isinstance(reference, str) and "properties" not in schema else None
        if isinstance(target, dict):
            schema = {**{key: value for key, value in schema.items() if key != "$ref"}, **target}
    return schema


def _types(own: Any, root: Any, depth: int, seen: set[str]) -> set[str]:
    if not isinstance(own, dict) or not depth:
        return set()
    if isinstance(reference := own.get("$ref"), str):
        if reference in seen:  # its types are found already
            return set()
        seen.add(reference)
        return _types(resolve(reference, root), root, depth - 1, seen)
    named = own.get("type")
    if isinstance(named, str | list):
        return {named} if isinstance(named, str) else {each for each in named if isinstance(each, str)}
    values = own.get("enum", [own["const"]] if "const" in own else [])
    found = {name for value in _listed(values) for name in _names(value)}
    for union in ("anyOf", "oneOf", "allOf"):
        for each in _listed(own.get(union)):
            found |= _types(each, root, depth - 1, seen)
    if not found and "properties" in own:
        return {"object"}
    return found


def _listed(value: Any) -> list[Any]:
    """Returns a list, or none in place of what no schema may have there: tools that are only parsed are not checked."""
    return value if isinstance(value, list) else []


def allowed_values(own: Any, root: Any) -> list[Any] | None:
    """Returns the values of a schema's enum or const, or None if it has neither."""
    for _ in range(_DEPTH):
        if isinstance(own, dict) and isinstance(own.get("$ref"), str):
            own = resolve(own["$ref"], root)
    if not isinstance(own, dict):
        return None
    return [own["const"]] if "const" in own else own.get("enum")


def resolve(reference: str, root: Any) -> Any:
    """Returns the schema behind a reference such as #/$defs/NAME, or None."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _names(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    return {name for name, kind in _PYTHON.items() if isinstance(value, kind)}


def _fits(value: Any, types: set[str]) -> bool:
    """Returns whether a value has one of the types. A number without a fraction is an integer."""
    names = _names(value) | ({"integer"} if isinstance(value, float) and value.is_integer() else set())
    return not types or bool(names & types) or types == {"null"}
