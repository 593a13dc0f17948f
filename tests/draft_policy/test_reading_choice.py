"""Which new requests are not read for drafts."""

import pytest

from specengine.draft_policy.reading_choice import FEWEST, FIRST, MOST, ReadingChoice


def losing(batch, texts=FIRST):
    readings = ReadingChoice()
    for _ in range(texts):
        readings.record_gain(batch, -0.01)
    return readings


@pytest.mark.parametrize("batch", [1, 2, 8, 16, 56])
def test_where_drafts_do_not_pay_for_reading_one_whole_batch_in_several_is_read(batch):
    readings, rounds = losing(batch), min(max(FEWEST, batch), MOST)
    whole = [{readings.should_skip(batch) for _ in range(batch)} for _ in range(2 * rounds)]
    assert whole == 2 * ([{True}] * (rounds - 1) + [{False}])


def test_of_a_few_texts_or_another_size_of_batch_nothing_is_known():
    readings = losing(16, FIRST - 1)
    assert not readings.should_skip(16)
    readings.record_gain(16, -0.01)
    assert readings.should_skip(16) and not readings.should_skip(4)


def test_seldom_gains_that_are_large_pay_for_reading_and_small_ones_do_not():
    for gained, unread in ((0.2, False), (0.1, True)):
        readings = losing(1, 64)
        for _ in range(50):
            for each in (gained, *[-0.01] * 15):
                readings.record_gain(1, each)
        found = []
        for each in (gained, *[-0.01] * 15):
            readings.record_gain(1, each)
            found.append(readings.should_skip(1))
        assert (sum(found) > 8) == unread


def test_what_gains_again_is_read_again():
    readings = losing(16, 1000)
    for _ in range(1000):  # of which a sixteenth is read, which gains now as much as it lost
        if not readings.should_skip(16):
            readings.record_gain(16, 0.01)
    assert not any(readings.should_skip(16) for _ in range(300))
