"""Which cases run: in a plain `pytest` every test, with every value of each of its parameters once.

Further combinations of the values run under `-m full`, together with the cases that are marked so: one in `SHARE` of
each test's, drawn anew in each run by a seed that the header prints, or all with `--all-cases`. A costly test that is
marked `quick(n)` keeps n of its cases in a plain run.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest

SMALL = 3  # cases that a test may have without being cut
SHARE = 8  # a run draws one in SHARE of the further cases of each test


def wide(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """The values of a parameter, all but the first `quick` of them marked as full.

    A tuple is a row of values for several parameters.
    """
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=[] if number < quick else pytest.mark.full) for number, row in enumerate(rows)]


def looped(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`parametrize` as a loop within one case, for values that take little time each.

    All values run, also after a failure, and the message names those that failed. A skip counts as a failure.
    """
    columns = [name.strip() for name in names.split(",")]
    rows = [value if len(columns) > 1 else (value,) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            failures = []
            for row in rows:
                case = dict(zip(columns, row, strict=True))
                try:
                    test(**fixtures, **case)
                except (Exception, pytest.skip.Exception) as error:
                    failures.append((case, error))
            if failures:
                told = "\n\n".join(f"{case}: {type(error).__name__}: {error}" for case, error in failures)
                raise AssertionError(f"{len(failures)} of {len(rows)} cases:\n{told}") from failures[0][1]

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in columns]
        loop.__signature__ = signature.replace(parameters=kept)  # what pytest looks up fixtures by
        return loop

    return decorate


class Further(NamedTuple):
    """The cases of one test that a plain run leaves out. alone: there are no others."""

    cases: list[pytest.Item]
    alone: bool


def leave_to_full(items: Iterable[pytest.Item]) -> list[Further]:
    """Marks as full all cases that a plain run does not need in order to meet every value of every parameter.

    Returns the further cases of each test: these, and those that were marked as full before.
    """
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    further = []
    for cases in tests.values():
        plain = [case for case in cases if not case.get_closest_marker("full")]
        needed = covering([values_of(case) for case in plain])
        if plain and (quick := plain[0].get_closest_marker("quick")):
            needed = set(sorted(needed)[: quick.args[0]])
        for number, case in enumerate(plain):
            if number not in needed:
                case.add_marker(pytest.mark.full)
        further.append(Further([case for case in cases if case.get_closest_marker("full")], not needed))
    return further


def undrawn(further: Iterable[Further], seed: str) -> set[pytest.Item]:
    """Returns the further cases that a run with this seed leaves out. A test without others keeps at least one.

    The draw of a test depends on its name and the seed alone.
    """
    out = set()
    for cases, alone in further:
        if cases:
            draw = random.Random(f"{seed} {cases[0].nodeid.partition('[')[0]}")
            kept = max(int(alone), int(len(cases) / SHARE + draw.random()))  # one in SHARE in the mean of all seeds
            out.update(draw.sample(cases, len(cases) - kept))
    return out


def values_of(case: pytest.Item) -> frozenset[tuple]:
    """What the case was given, a tuple for each `parametrize` and each fixture with parameters."""
    params = dict(case.callspec.params)
    found = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        # By identity: all cases share the objects, and not all of them can be compared.
        found.append(tuple((name, id(params.pop(name))) for name in names if name in params))
    return frozenset([*found, *(((name, id(value)),) for name, value in params.items())])


def covering(cases: Sequence[frozenset[tuple]]) -> set[int]:
    """Numbers of cases that together have every value of every parameter."""
    if len(cases) <= SMALL:
        return set(range(len(cases)))
    missing = set().union(*cases)
    used: Counter[tuple] = Counter()
    chosen = set()
    while missing:
        # The most that is new; among equals the values used least, so that short parameters take turns.
        best = min(range(len(cases)), key=lambda i: (-len(cases[i] & missing), sum(used[v] for v in cases[i]), i))
        chosen.add(best)
        missing -= cases[best]
        used.update(cases[best])
    return chosen
