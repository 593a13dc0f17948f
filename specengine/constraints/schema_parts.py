"""A schema with all that it joins, but without those of inner values: small enough to try one keyword after another."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specengine.constraints.schema_nodes import SchemaDocument, map_schemas

JOINS = ("allOf", "anyOf", "oneOf")
_MOST, _DEEPEST = 300, 30  # keywords of a part, and schemas around one; what is joined beyond counts as true

Keyword = tuple[dict[str, Any], str]  # and the schema that has it


def joined_part(
    node: dict[str, Any], document: SchemaDocument, kept: Collection[tuple[int, str]] | None = None
) -> tuple[Any, list[Keyword]]:
    """Returns a schema and those that it joins by JOINS or $ref as one, with `true` for inner values; its keywords.

    kept: the keywords that it has, by id of their schema and name; None: all.
    """
    keywords: list[Keyword] = []

    def part(node: Any, around: tuple[int, ...]) -> Any:
        if not isinstance(node, dict):
            return node
        if id(node) in around or len(keywords) > _MOST or len(around) > _DEEPEST:
            return True
        form: dict[str, Any] = {}
        targets = []
        for key, value in node.items():
            if key in ("$defs", "definitions") or (kept is not None and (id(node), key) not in kept):
                continue
            keywords.append((node, key))
            if key in JOINS and isinstance(value, list):
                form[key] = [part(each, (*around, id(node))) for each in value]
            elif key == "$ref" and isinstance(value, str) and (target := document.target(value)) is not None:
                targets.append(part(target, (*around, id(node))))
            else:
                form[key] = map_schemas(key, value, lambda each: isinstance(each, dict) or each)
        if targets and isinstance(joined := form.get("allOf", []), list):
            form["allOf"] = [*joined, *targets]
        return form

    return part(node, ()), keywords
