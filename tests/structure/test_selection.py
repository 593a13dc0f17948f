"""Which cases a plain run and a full run have (tests/selection.py)."""

from types import SimpleNamespace

import pytest

from tests.selection import SHARE, Further, covering, looped, undrawn


def cases_of(count: int, name: str = "tests/ops/test_linear.py::test_linear") -> list[SimpleNamespace]:
    return [Case(nodeid=f"{name}[{number}]") for number in range(count)]


class Case(SimpleNamespace):
    __hash__ = object.__hash__  # as pytest's items


def test_every_value_is_in_a_plain_run_and_few_cases_are():
    values = [frozenset({("a", a), ("b", b)}) for a in range(6) for b in range(6)]
    chosen = covering(values)
    assert set().union(*(values[number] for number in chosen)) == set().union(*values)
    assert len(chosen) == 6


@pytest.mark.parametrize("count", [1, SHARE, SHARE + 1, 100])
def test_runs_keep_one_in_a_few_further_cases_and_of_a_test_without_others_one_at_least(count):
    tests = [
        Further(cases_of(count), False),
        Further([], True),
        Further(cases_of(count, "tests/test_a.py::test_a"), True),
    ]
    kept = [[len(set(each) - undrawn(tests, str(seed))) for each, _ in tests] for seed in range(200)]
    some, none, alone = zip(*kept, strict=True)
    assert set(none) == {0} and min(alone) >= 1
    assert {*some, *alone} <= {count // SHARE, count // SHARE + 1}
    assert sum(some) / 200 == pytest.approx(count / SHARE, abs=0.15)


def test_a_seed_fixes_what_is_drawn_and_seeds_differ_until_all_cases_have_run():
    further = cases_of(40)
    drawn = [set(further) - undrawn([Further(further, False)], str(seed)) for seed in range(40)]
    assert drawn[0] == set(further) - undrawn([Further(further, False)], "0")
    assert drawn[0] != drawn[1]
    assert set().union(*drawn) == set(further)


def test_tests_draw_by_their_own_names():
    names = [f"tests/test_{letter}.py::test" for letter in "abcdefgh"]
    kept = [set(cases) - undrawn([Further(cases, False)], "3") for cases in (cases_of(80, name) for name in names)]
    assert len({tuple(sorted(case.nodeid.partition("[")[2] for case in each)) for each in kept}) == len(names)


def test_a_loop_names_the_cases_that_fail_or_are_skipped():
    ran = []

    @looped("number", range(4))
    def test(number):
        ran.append(number)
        if number == 1:
            pytest.skip("no device")
        assert number != 2

    with pytest.raises(AssertionError, match=r"(?s)2 of 4 cases.*'number': 1.*Skipped.*'number': 2"):
        test()
    assert ran == [0, 1, 2, 3]
