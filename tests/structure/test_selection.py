"""Which cases a plain run and a full run have (tests/selection.py)."""

from types import SimpleNamespace

import pytest

from tests.selection import SHARE, covering, undrawn


def cases(count: int, name: str = "tests/ops/test_linear.py::test_linear") -> list[SimpleNamespace]:
    return [Case(nodeid=f"{name}[{number}]") for number in range(count)]


class Case(SimpleNamespace):
    __hash__ = object.__hash__  # as pytest's items


def test_every_value_is_in_a_plain_run_and_few_cases_are():
    values = [frozenset({("a", a), ("b", b)}) for a in range(6) for b in range(6)]
    chosen = covering(values)
    assert set().union(*(values[number] for number in chosen)) == set().union(*values)
    assert len(chosen) == 6


@pytest.mark.parametrize("count", [1, SHARE, SHARE + 1, 100])
def test_a_sampled_run_keeps_one_in_a_few_further_cases_of_each_test(count):
    left = [cases(count), [], cases(count, "tests/ops/test_layer.py::test_layer")]
    out = undrawn(left, "1")
    assert [len(set(each) - out) for each in left] == [-(-count // SHARE), 0, -(-count // SHARE)]


def test_a_seed_fixes_what_is_drawn_and_seeds_differ_until_all_cases_have_run():
    further = cases(40)
    drawn = [set(further) - undrawn([further], str(seed)) for seed in range(40)]
    assert drawn[0] == set(further) - undrawn([further], "0")
    assert drawn[0] != drawn[1]
    assert set().union(*drawn) == set(further)
