import pytest

from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.cycle_time import cycle_seconds
from specengine.draft_policy.pauses import LONGEST, SHARE, SHORT, TRIED, Pauses
from specengine.draft_policy.reading_choice import FEWEST, FIRST, MOST, ReadingChoice
from specengine.draft_policy.trial import Trial

COSTS = CostModel((1, 64), (0.01, 0.05))


def cycles(trial, count, tokens, seconds=0.0, nodes=20):
    """How many of them drafted, and the time of all against plain cycles'."""
    plain, drafted = cycle_seconds(COSTS, 1, 0, 0.0), cycle_seconds(COSTS, 1, nodes, 0.0) + seconds
    used, time, said = 0, 0.0, 0
    for _ in range(count):
        if trial.should_skip():
            time, said = time + plain, said + 1
            trial.record_commit(1)
        else:
            trial.record_draft(1, nodes, 0.0, seconds)
            trial.record_commit(tokens)
            used, time, said = used + 1, time + drafted, said + tokens
    return used, time / (said * plain)


def test_what_pays_is_always_used():
    used, relative = cycles(Trial(COSTS), 100, tokens=4)
    assert used == 100 and relative < 0.7


@pytest.mark.parametrize("seconds", [0.001, 0.1, 1.0])
def test_what_does_not_pay_costs_a_fiftieth(seconds):
    trial = Trial(COSTS)
    cycles(trial, 5_000, tokens=1, seconds=seconds)  # until it is known
    used, relative = cycles(trial, 50_000, tokens=1, seconds=seconds)
    assert used >= 5 and 1 < relative < 1.025


def test_prompts_that_were_read_for_what_does_not_pay_count():
    trial = Trial(COSTS)
    plain = cycle_seconds(COSTS, 1, 0, 0.0)
    for _ in range(20):
        trial.record_draft(1, 20, 0.0, 0.0)
        trial.record_commit(1)
    pauses = []
    for prompts in (0, 10, 0):
        trial.record_reading(1, 0.0, prompts * plain)
        trial.record_draft(1, 20, 0.0, 0.0)
        trial.record_commit(1)
        pauses.append(next(i for i in range(10_000) if not trial.should_skip()))
    assert pauses[1] == pytest.approx(pauses[0] + 500, abs=1) and pauses[2] == pytest.approx(pauses[0], abs=1)


def test_it_is_used_again_once_it_pays():
    trial = Trial(COSTS)
    assert cycles(trial, 500, tokens=1)[0] < 50
    assert cycles(trial, 500, tokens=5)[0] > 400


def test_a_cycle_of_others_says_nothing():
    trial = Trial(COSTS)
    trial.record_commit(1)
    assert not trial.should_skip()


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


def test_one_bad_draft_behind_a_long_prompt_pauses_little():
    trial = Trial(COSTS)
    trial.record_reading(1, 0.0, 30 * cycle_seconds(COSTS, 1, 0, 0.0))
    assert cycles(trial, 1, tokens=1)[0] == 1
    assert cycles(trial, 128, tokens=4)[0] > 80
