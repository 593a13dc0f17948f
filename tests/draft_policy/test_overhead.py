import pytest

from specengine.draft_policy import overhead as module
from specengine.draft_policy.overhead import Overhead


class Sequence:
    pass


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def cycle(self, overhead, requests, drafted, predicted, taken):
        began = overhead.begin(requests)
        overhead.expect(requests, drafted, began, predicted)
        self.now += taken


def test_what_cycles_take_beyond_the_prediction_is_learned_by_kind(monkeypatch):
    clock, overhead, requests = Clock(monkeypatch), Overhead(), [Sequence()]
    for _ in range(200):
        clock.cycle(overhead, requests, False, 3.0, 3.1)
        clock.cycle(overhead, requests, True, 5.0, 5.6)
    assert overhead[False] == pytest.approx(0.1, abs=0.01)
    assert overhead[True] == pytest.approx(0.6, abs=0.01)


def test_a_cycle_that_waited_for_something_else_counts_little_and_another_batch_not_at_all(monkeypatch):
    clock, overhead, requests = Clock(monkeypatch), Overhead(), [Sequence()]
    clock.cycle(overhead, requests, True, 4.0, 1000.0)
    clock.cycle(overhead, requests, True, 4.0, 4.0)
    assert overhead[True] == pytest.approx(4.0 / 16)
    before = overhead[True]
    clock.cycle(overhead, [*requests, Sequence()], True, 4.0, 9.0)  # the one before may have ended any time ago
    clock.cycle(overhead, requests, True, 4.0, 9.0)
    assert overhead[True] == before


def test_a_batch_that_lies_where_an_earlier_one_was_is_another(monkeypatch):
    clock, overhead = Clock(monkeypatch), Overhead()
    places = set()
    for _ in range(50):
        requests = [Sequence()]
        places.add(id(requests[0]))
        clock.cycle(overhead, requests, True, 4.0, 1000.0)
        del requests
    assert len(places) < 50 and overhead[True] == 0
