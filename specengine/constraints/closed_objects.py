"""Closes the objects of a schema: where it names properties, no others may come."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specengine.constraints.schema_nodes import SchemaDocument, map_schemas

_UNIONS = ("anyOf", "oneOf")
_JOINED = (*_UNIONS, "allOf", "dependentSchemas", "else", "if", "not", "then")  # schemas of the same value
_SAYING = ("properties", "required", "unevaluatedProperties")  # which keys an object has
_STATED = ("additionalProperties", "patternProperties")
_MOST = 200_000  # schemas and names that are read or written


class _Joined(NamedTuple):
    """What joined schemas say together.  named: one has `properties`.  stated: one says which other keys may come."""

    names: dict[str, Any]
    named: bool
    stated: bool


def close_objects(root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema whose objects have no other keys than those that its `properties` and `required` name.

    Schemas that are joined, by allOf, by a reference or beside a union, are closed together: one alone would forbid
    the keys of the others. They stay as they are where one has additionalProperties, patternProperties or
    unevaluatedProperties. The alternatives of a union are closed one by one. An object without `properties` stays open.
    Raises ValueError for a schema that grows too large.
    """
    return _Closing(SchemaDocument(root)).whole()


class _Closing:
    """A schema that references name may be a whole or joined with others, so it may become two definitions."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._names: dict[tuple[str, bool], str] = {}  # of definitions, by reference and whether it is closed
        self._waiting: list[tuple[str, Any, bool]] = []
        self._left = _MOST

    def whole(self) -> dict[str, Any]:
        root, definitions = self._close(self._document.root, {}), {}
        while self._waiting:
            name, schema, closed = self._waiting.pop()
            definitions[name] = self._close(schema, {}) if closed else self._part(schema)
        return {**root, "$defs": definitions} if definitions else root

    def _close(self, node: Any, others: Mapping[str, Any]) -> Any:
        """Closes the schema of a whole value.  others: keys that may come besides its own."""
        if not isinstance(node, dict):
            return node
        own, every = self._joined(node, unions=False), self._joined(node)
        if not own.named and not others and not own.stated:
            return self._part(node, lambda each: self._close(each, {}))
        if every.stated or not (every.named or others):
            return self._part(node)
        if "$ref" in node and not others and not {*node} & {*_JOINED, *_SAYING}:
            beside = {key: value for key, value in node.items() if key != "$ref"}
            return {**self._part(beside), "$ref": self._define(node["$ref"], True)}
        beside = {**others, **own.names}
        closed = self._part(
            node, lambda each: self._close(each, beside) if self._joined(each).named else self._part(each)
        )
        if not isinstance(known := closed.get("properties", {}), dict):
            return closed
        closed["properties"] = {**dict.fromkeys([*known, *every.names, *others], True), **known}
        closed["additionalProperties"] = False
        if not others:
            closed.pop("unevaluatedProperties", None)  # it says the same
        return closed

    def _part(self, node: Any, close: Callable[[Any], Any] | None = None) -> Any:
        """Closes what is inside of a schema, and leaves its own keys open.  close: for the alternatives of a union."""
        if not isinstance(node, dict):
            return node
        self._spend(1)
        part = {}
        for key, value in node.items():
            if key == "$ref":
                part[key] = self._define(value, False)
            elif key in _JOINED:
                part[key] = map_schemas(key, value, close if close and key in _UNIONS else self._part)
            elif key not in ("$anchor", "$defs", "$id", "definitions"):  # definitions are written anew
                part[key] = map_schemas(key, value, lambda each: self._close(each, {}))
        return part

    def _define(self, reference: Any, closed: bool) -> Any:
        """Returns a reference to the definition of what is referred to; where that is nothing, the old reference."""
        if not isinstance(reference, str) or (target := self._document.target(reference)) is None:
            return reference
        if (reference, closed) not in self._names:
            name = re.sub(r"\W", "_", reference.rpartition("/")[2], flags=re.ASCII)
            name = f"{name}_{len(self._names)}" if name in self._names.values() else name
            self._names[reference, closed] = name
            self._waiting.append((name, target, closed))
        return f"#/$defs/{self._names[reference, closed]}"

    def _joined(self, node: Any, unions: bool = True) -> _Joined:
        """Reads a schema with all that it joins.  unions: with its own, those of joined schemas always."""
        names: dict[str, Any] = {}
        named = stated = False
        seen: set[int] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if not isinstance(each, dict) or id(each) in seen:
                continue
            seen.add(id(each))
            properties, required = each.get("properties"), each.get("required")
            found = [*properties] if isinstance(properties, dict) else []
            found += [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
            self._spend(1 + len(found))
            names.update(dict.fromkeys(found))
            named = named or isinstance(properties, dict)
            stated = (
                stated or any(key in each for key in _STATED) or each.get("unevaluatedProperties") not in (None, False)
            )
            inner = [self._document.target(each["$ref"])] if isinstance(each.get("$ref"), str) else []
            for key in _JOINED:
                if key in each and (unions or each is not node or key not in _UNIONS):
                    map_schemas(key, each[key], inner.append)
            waiting += reversed(inner)
        return _Joined(names, named, stated)

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("its joined schemas are too many to be closed")
