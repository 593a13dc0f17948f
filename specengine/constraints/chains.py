"""How deep a grammar's parts lead into each other: the grammar engine's own stack overflows without an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")
LONGEST = 400  # parts; 1,500 overflow a stack of 8 MiB


def longest_chain(graph: Mapping[T, Iterable[T]]) -> int:
    """Returns how many nodes a walk may meet, none of them twice, at most. Each cycle counts with all its nodes."""
    backwards: dict[T, list[T]] = {node: [] for node in graph}
    for node, targets in graph.items():
        for target in targets:
            if target in graph:
                backwards[target].append(node)
    seen: set[T] = set()
    order = [node for start in graph for node in _reached(graph, start, seen)]
    seen, length = set(), dict[T, int]()
    for start in reversed(order):  # Kosaraju: each cycle behind all that lead to it
        cycle = _reached(backwards, start, seen)
        before = max((length.get(node, 0) for member in cycle for node in backwards[member]), default=0)
        length.update(dict.fromkeys(cycle, before + len(cycle)))
    return max(length.values(), default=0)


def _reached(graph: Mapping[T, Iterable[T]], start: T, seen: set[T]) -> list[T]:
    """Returns the nodes that are reached from one and not seen yet, each behind those that it leads to."""
    if start in seen:
        return []
    seen.add(start)
    found, path = [], [(start, iter(graph[start]))]
    while path:
        node, targets = path[-1]
        target = next((each for each in targets if each in graph and each not in seen), None)
        if target is None:
            found.append(node)
            path.pop()
        else:
            seen.add(target)
            path.append((target, iter(graph[target])))
    return found
