"""Bounds `multipleOf` of schemas before they are compiled: a number of n has an automaton of n states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MOST = 10_000  # states, which compile in 0.1 s; a million take 15 s and 370 MB
_VALUES = ("const", "enum", "default", "examples")  # hold values and no schemas


def check_multiples(schema: Any, name: str) -> None:
    """Refuses a schema whose multiples would take long to compile.

    Where schemas may be joined, by allOf or a reference, all their multiples count as joined.
    Raises ValueError naming the parameter and the place.
    """
    found, joins = [], False
    for place, node in _nodes(schema, ""):
        joins = joins or "allOf" in node or "$ref" in node
        step = node.get("multipleOf")
        if not isinstance(step, int | float) or isinstance(step, bool) or not 0 < step < math.inf:
            continue  # the grammar engine says what is wrong
        exact = Decimal(str(step)).as_tuple()
        assert isinstance(exact.exponent, int)
        digits, places = int("".join(map(str, exact.digits))), exact.exponent
        if places > 9 or digits * 10 ** max(places, 0) > MOST:
            raise ValueError(f"{name}: {place}/multipleOf: expected a number of at most {MOST} steps, got {step}")
        found.append((digits, places))
    least = max(min((places for _, places in found), default=0), -30)
    joined = math.lcm(*{digits * 10 ** max(places - least, 0) for digits, places in found})
    if joins and joined > MOST:
        raise ValueError(f"{name}: multipleOf: joined by allOf or $ref, its numbers take more than {MOST} steps")


def _nodes(node: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of a schema with their places."""
    open_nodes = [(place, node)]
    while open_nodes:
        place, node = open_nodes.pop()
        if isinstance(node, dict):
            yield place, node
            open_nodes += [(f"{place}/{key}", each) for key, each in node.items() if key not in _VALUES]
        elif isinstance(node, list):
            open_nodes += [(f"{place}/{number}", each) for number, each in enumerate(node)]
