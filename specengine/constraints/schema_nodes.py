"""The schemas inside of a schema, and what its references name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote

_ONE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
SCHEMA_KEYWORDS = frozenset((*_ONE, *_LISTS, *_MAPS))


def inner_schemas(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the place of each schema right inside of one, and that schema."""
    for key, value in node.items():
        if key in _MAPS and isinstance(value, dict):
            yield from ((f"/{key}/{_escaped(name)}", each) for name, each in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"/{key}/{number}", each) for number, each in enumerate(value))
        elif key in _ONE:
            yield f"/{key}", value


def map_schemas(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a keyword's value with each schema in it changed."""
    if key in _MAPS and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [change(each) for each in value]
    return change(value) if key in _ONE else value


class SchemaDocument:
    """A JSON schema as a whole.  root: JSON; it may change, but not its names."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def nodes(self, follow: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields all schemas that are objects, each once, with their places; a schema before those inside of it.

        follow: those too that only references lead to.
        """
        seen: set[int] = set()
        waiting = [("", self.root)]
        while waiting:
            place, node = waiting.pop()
            if isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                yield place, node
                inner = [(place + step, each) for step, each in inner_schemas(node)]
                waiting += reversed(inner)
                if follow and isinstance(reference := node.get("$ref"), str):
                    waiting.append((unquote(reference).removeprefix("#"), self.target(reference)))

    def target(self, reference: str) -> Any:
        """Returns a reference's schema: #/$defs/NAME, #ANCHOR or an $id; None where the document has none."""
        base, _, fragment = unquote(reference).partition("#")
        if fragment and not fragment.startswith("/"):
            return self._named.get(f"#{fragment}")
        found = self._named.get(base) if base else self.root
        for part in fragment.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                found = found.get(part) if isinstance(found, dict) else None
        return found

    @cached_property
    def _named(self) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for _, node in self.nodes(follow=False):
            for key, sign in (("$id", ""), ("$anchor", "#")):
                if isinstance(name := node.get(key), str):
                    named.setdefault(f"{sign}{name.removesuffix('#')}", node)
        return named


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
