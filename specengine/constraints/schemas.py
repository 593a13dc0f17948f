"""Fits a JSON schema to the grammar engine: what that cannot hold is left out or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from specengine.constraints.chains import LONGEST, longest_chain
from specengine.constraints.closed_objects import close_objects
from specengine.constraints.schema_nodes import SchemaDocument, inner_schemas
from specengine.constraints.schema_parts import joined_part
from specengine.constraints.schema_rules import Fault, Nodes, deep_values, faults, multiples, narrow_bounds, simplify

# JSON is written as json.dumps writes it. Models know this form best, and every space between two values is forced:
# where the grammar allows any whitespace, small models write spaces until their tokens run out.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ESCAPES = 'nrbtf\\"u'  # that a text may have after a backslash
_TRIES = 3000  # of keywords, in a schema that has some that the engine lacks
_SHOWN = 300  # characters of a place, and of a reason

Coverage = Literal["strict", "whole", "lenient"]


def fit_schema(
    schema: Mapping[str, Any], name: str, coverage: Coverage = "whole", closed: bool = False
) -> dict[str, Any]:
    """Returns a schema that the grammar engine holds, without annotations and in this engine's form of JSON.

    coverage: "strict" refuses each keyword and value that the engine lacks; "whole" ignores unknown formats, which are
    annotations; "lenient" ignores all that the engine lacks, and reads oneOf as anyOf.
    closed: objects with `properties` have no further keys, see close_objects().
    Raises ValueError with `name`, the place and the reason.
    """
    try:
        root = json.loads(json.dumps(dict(schema)))
        form = {"coerce_one_of": True} if coverage == "lenient" else root.pop("x-guidance", {})
        if not isinstance(form, dict):
            raise ValueError("/x-guidance: expected an object")
        document = SchemaDocument(root)
        nodes = [*document.nodes()]
        for _, node in nodes:
            simplify(node)
        _settle((fault for place, node in nodes for fault in [*deep_values(place, node)]), coverage)
        if closed:
            document = SchemaDocument(close_objects(root))
        nodes = [*document.nodes()]
        _check_chains(document, nodes)
        _settle((fault for place, node in nodes for fault in [*faults(place, node, _knows_format)]), coverage)
        _settle([*multiples(nodes), *narrow_bounds(nodes)], coverage)
        document.root["x-guidance"] = {**JSON_FORM, **form, **_escapes(nodes, form)}
        if reason := _engine_fault(document.root):
            _settle(_unsupported(document, nodes), coverage)
            reason = _engine_fault(document.root)
        if reason:
            raise ValueError(reason)
    except RecursionError:
        raise ValueError(f"{name}: is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return document.root


def _settle(found: Iterable[Fault], coverage: Coverage) -> None:
    """Leaves out the keywords that the coverage allows to; raises ValueError for others."""
    for fault in found:
        if coverage != "lenient" and not (coverage == "whole" and fault.annotation):
            place = fault.place if len(fault.place) <= _SHOWN else f"{fault.place[:100]}...{fault.place[-100:]}"
            raise ValueError(f"{place}: {fault.reason}")
        del fault.node[fault.key]


def _check_chains(document: SchemaDocument, nodes: Nodes) -> None:
    graph = {}
    for _, node in nodes:
        graph[id(node)] = [id(each) for _, each in inner_schemas(node)]
        if isinstance(reference := node.get("$ref"), str):
            graph[id(node)].append(id(document.target(reference)))
    if longest_chain(graph) > LONGEST:
        raise ValueError(f"its schemas refer to each other more than {LONGEST} levels deep")


def _escapes(nodes: Nodes, form: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options under which each key of an object has one spelling, where that decides about its value.

    Without them `\\u006e` would be a further key beside `n`. Control characters can only be written so; then none can.
    """
    allowed = form.get("json_allowed_escapes", _ESCAPES)
    if not isinstance(allowed, str) or not any(map(_tells_keys_apart, (node for _, node in nodes))):
        return {}
    return {"json_allowed_escapes": allowed.replace("u", ""), "json_allow_general_unicode_escapes": False}


def _tells_keys_apart(node: Mapping[str, Any]) -> bool:
    more = node.get("additionalProperties") is not False
    patterns = bool(node.get("patternProperties"))
    return (bool(node.get("properties") or node.get("required")) and (patterns or more)) or (patterns and more)


def _unsupported(document: SchemaDocument, nodes: Nodes) -> Iterator[Fault]:
    """Tries the keywords of each schema, joined with those of the schemas that hold for the same value; inner first."""
    places, tries = {id(node): place for place, node in nodes}, 0
    for _, node in reversed(nodes):
        part, keywords = joined_part(node, document)
        if not _lacks(document, part):
            continue
        kept: set[tuple[int, str]] = set()
        for owner, key in keywords:
            kept.add((id(owner), key))
            if (tries := tries + 1) > _TRIES:
                raise ValueError("too many of its keywords are not supported")
            if reason := _lacks(document, joined_part(node, document, kept)[0]):
                kept.remove((id(owner), key))
                yield Fault(f"{places[id(owner)]}/{key}", owner, key, reason)


def _lacks(document: SchemaDocument, part: Any) -> str:
    """Returns why the engine does not compile a part. That no value fulfils it is no reason: that is its meaning."""
    reason = _engine_fault({**part, "x-guidance": document.root["x-guidance"]})
    return "" if "Unsatisfiable" in reason else reason


@lru_cache(maxsize=256)
def _knows_format(name: str) -> bool:
    return not _engine_fault({"type": "string", "format": name})


def _engine_fault(schema: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher  # 3 MB, needed by constrained requests alone

    try:
        reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except ValueError as error:
        reason = str(error)
    return " ".join(reason.split())[:_SHOWN]
