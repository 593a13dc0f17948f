"""Keywords that say nothing, and those that the grammar engine takes but would not hold exactly, or at a high cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeGuard

from specengine.constraints.schema_nodes import SCHEMA_KEYWORDS

MOST = 10_000  # states of `multipleOf`, which compile in 0.1 s; a million take 15 s and 370 MB
DEEPEST = 120  # lists and objects around a value; the grammar engine reads 124
_ANNOTATIONS = (
    *("$comment", "$dynamicAnchor", "$recursiveAnchor", "default", "deprecated", "description", "examples"),
    *("readOnly", "title", "writeOnly"),
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_DOUBLE, _LONG = 2**53, 2**63  # doubles hold all whole numbers up to the first; the second ends 64 bits

Nodes = Sequence[tuple[str, dict[str, Any]]]  # schemas with their places


class Fault(NamedTuple):
    """A keyword that a grammar cannot hold, and why.  node: the schema that has it.  annotation: it may be ignored."""

    place: str
    node: dict[str, Any]
    key: str
    reason: str
    annotation: bool = False


def simplify(node: dict[str, Any]) -> None:
    """Leaves out annotations and keywords that every value fulfils, and writes counts as whole numbers."""
    for key in [key for key, value in node.items() if key in _ANNOTATIONS or _is_idle(node, key, value)]:
        del node[key]
    for key in _COUNTS:
        if isinstance(count := node.get(key), float) and count.is_integer():
            node[key] = int(count)


def allows_strings(node: Mapping[str, Any]) -> bool:
    """Returns whether a schema's own type may be a string."""
    named = node.get("type", "string")
    return "string" in named if isinstance(named, list) else named == "string"


def _is_idle(node: Mapping[str, Any], key: str, value: Any) -> bool:
    if key in ("uniqueItems", "not"):
        return value is False
    if key in ("unevaluatedItems", "unevaluatedProperties"):
        return _is_any(value)
    if key == "propertyNames":
        return _is_any(value) or (
            isinstance(value, dict) and {*value} <= {"type", *_ANNOTATIONS} and allows_strings(value)
        )
    if key in ("dependencies", "dependentRequired", "dependentSchemas"):
        return isinstance(value, dict) and all(each == [] or _is_any(each) for each in value.values())
    if key in ("minContains", "maxContains"):
        return "contains" not in node
    if key in ("then", "else"):
        return "if" not in node
    if key == "if":
        return "then" not in node and "else" not in node
    if key == "format":
        return not allows_strings(node)
    endless = {"minimum": -math.inf, "exclusiveMinimum": -math.inf, "maximum": math.inf, "exclusiveMaximum": math.inf}
    return isinstance(value, float) and value == endless.get(key)


def _is_any(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and {*schema} <= {*_ANNOTATIONS})


def deep_values(place: str, node: dict[str, Any]) -> Iterator[Fault]:
    """Yields the keywords whose values are nested too deeply for the grammar engine's reader."""
    depth = place.count("/")
    for key, value in node.items():
        if isinstance(value, dict | list) and depth + (1 if key in SCHEMA_KEYWORDS else _levels(value)) > DEEPEST:
            yield Fault(f"{place}/{key}", node, key, "is nested too deeply")


def faults(place: str, node: dict[str, Any], knows_format: Callable[[str], bool]) -> Iterator[Fault]:
    """Yields what the grammar engine would take and not hold.  knows_format: whether it has a format."""
    for key, value in node.items():
        if key in _BOUNDS and not _is_exact_bound(node, key, value):
            yield Fault(f"{place}/{key}", node, key, "the grammar engine would round this bound")
        elif key in ("const", "enum") and not all(map(_is_exact, _numbers(value))):
            yield Fault(f"{place}/{key}", node, key, "the grammar engine would round a number of it")
        elif key == "minProperties" and _counts_open_keys(node, value):
            reason = "keys that the schema does not name may repeat, so it cannot demand more than one of them"
            yield Fault(f"{place}/{key}", node, key, reason)
        elif key == "format" and isinstance(value, str) and not knows_format(value):
            yield Fault(f"{place}/{key}", node, key, f"unknown format {value[:40]!r}", annotation=True)


def multiples(nodes: Nodes) -> Iterator[Fault]:
    """Yields multiples that take many states, by themselves or together with those before them.

    Where schemas may be joined, by allOf or a reference, all their multiples count as joined.
    """
    joins, found = False, []
    for place, node in nodes:
        joins = joins or "allOf" in node or "$ref" in node
        step = node.get("multipleOf")
        if _is_number(step) and step > 0:
            exact = Decimal(str(step) if isinstance(step, float) else step).as_tuple()
            assert isinstance(exact.exponent, int)
            found.append((place, node, int(Decimal((0, exact.digits, 0))), exact.exponent))
    least, joined = max(min((places for *_, places in found), default=0), -30), 1
    for place, node, digits, places in found:
        if places > 9 or digits * 10 ** max(places, 0) > MOST:
            shown = str(node["multipleOf"])[:40]
            reason = f"expected a number of at most {MOST} steps, got {shown}"
        elif (both := math.lcm(joined, digits * 10 ** max(places - least, 0))) > MOST and joins:
            reason = f"joined by allOf or $ref, such numbers take more than {MOST} steps"
        else:
            joined = both
            continue
        yield Fault(f"{place}/multipleOf", node, "multipleOf", reason)


def narrow_bounds(nodes: Nodes) -> Iterator[Fault]:
    """Yields exclusive bounds that are whole numbers, with the other bound less than one away.

    Of such a range the grammar engine takes the excluded number, too. Where schemas may be joined, any two bounds may
    meet.
    """
    numbers = [(place, node) for place, node in nodes if node.get("type") != "integer"]
    joins = any(key in node for _, node in nodes for key in ("allOf", "anyOf", "oneOf", "$ref"))
    for key, limit, far, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        every = [node.get(each) for _, node in numbers for each in far]
        for place, node in numbers:
            bound = node.get(limit) if node.get(key) is True else node.get(key)
            if _is_number(bound) and bound == int(bound):
                others = every if joins else [node.get(each) for each in far]
                if any(_is_number(other) and 0 <= sign * (other - bound) < 1 for other in others):
                    yield Fault(f"{place}/{key}", node, key, "the grammar engine would not exclude this number")


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_exact_bound(node: Mapping[str, Any], key: str, value: Any) -> bool:
    if key.startswith("exclusive"):  # of whole numbers the engine takes the next one
        return not isinstance(value, int | float) or abs(value) < _DOUBLE
    named = node.get("type")
    kinds = named if isinstance(named, list) else [named]
    return _is_exact(value, "integer" in kinds and "number" not in kinds)


def _is_exact(number: Any, whole: bool | None = None) -> bool:
    """Returns whether the grammar engine keeps a number's value.  whole: it writes it as a whole number."""
    if not isinstance(number, int | float) or abs(number) <= _DOUBLE:
        return True
    if isinstance(number, int) if whole is None else whole:
        return abs(number) < _LONG and float(number) == number
    return abs(number) < 2**1000 and Decimal(repr(float(number))) == Decimal(number)


def _numbers(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting += each.values() if isinstance(each, dict) else each
        else:
            yield each


def _counts_open_keys(node: Mapping[str, Any], least: Any) -> bool:
    required = node.get("required")
    named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    is_open = node.get("additionalProperties") is not False or bool(node.get("patternProperties"))
    return is_open and isinstance(least, int | float) and least > 1 + len(named)


def _levels(value: Any) -> int:
    """Returns how many lists and objects are around the innermost value."""
    levels, inner = 0, [value]
    while inner := [each for each in inner if isinstance(each, dict | list)]:
        levels += 1
        inner = [each for outer in inner for each in (outer.values() if isinstance(outer, dict) else outer)]
    return levels
