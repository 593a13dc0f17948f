"""For how long a use that loses time is skipped."""

import pytest

from specengine.draft_policy.pauses import LONGEST, SHARE, SHORT, TRIED, Pauses


def uses_of(pauses, requests, saved, cycles=4000) -> int:
    """How many of so many cycles used what saves so much of a plain one."""
    uses = 0
    for _ in range(cycles):
        if not pauses.should_skip(requests):
            pauses.record_saving(requests, saved, 1.0)
            uses += 1
    return uses


@pytest.mark.parametrize("saved, pause", [(-0.001, SHORT), (-1.0, SHARE), (-1000.0, LONGEST)])
def test_pauses_are_as_long_as_what_they_save_is_large(saved, pause):
    pauses = Pauses()
    uses_of(pauses, 1, saved)  # they grow
    assert uses_of(pauses, 1, saved) == pytest.approx(4000 / (pause + 1), abs=1)


def test_what_loses_at_one_size_of_batch_is_used_at_another():
    pauses = Pauses()
    assert uses_of(pauses, 16, -1.0) < 100
    assert uses_of(pauses, 1, 0.1) == 4000


def test_what_is_bearable_for_one_sequence_is_not_for_many():
    pauses = Pauses(bearable=0.05)
    assert uses_of(pauses, 1, -0.04) == 4000
    assert uses_of(pauses, 16, -0.04) < 400


def test_what_pays_again_is_used_again_every_cycle():
    pauses = Pauses()
    uses_of(pauses, 1, -1.0, 300)
    uses_of(pauses, 1, 1.0, 500)
    assert uses_of(pauses, 1, 1.0, 100) == 100


def test_what_gains_once_is_used_again_at_once():
    pauses = Pauses()
    uses_of(pauses, 1, -1.0, 300)
    while pauses.should_skip(1):
        pass
    pauses.record_saving(1, 0.1, 1.0)
    assert not pauses.should_skip(1)
    pauses.record_saving(1, -0.1, 1.0)
    assert pauses.should_skip(1)


def test_nothing_pauses_before_it_was_tried():
    pauses = Pauses()
    for _ in range(TRIED):
        assert not pauses.should_skip(1)
        pauses.record_saving(1, -1.0, 1.0)
    assert pauses.should_skip(1)
