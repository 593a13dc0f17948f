"""When a drafter that drafts all or nothing skips a cycle."""

import pytest

from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.cycle_time import cycle_seconds
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


def test_one_bad_draft_behind_a_long_prompt_pauses_little():
    trial = Trial(COSTS)
    trial.record_reading(1, 0.0, 30 * cycle_seconds(COSTS, 1, 0, 0.0))
    assert cycles(trial, 1, tokens=1)[0] == 1
    assert cycles(trial, 128, tokens=4)[0] > 80
