import pytest

from specengine.drafting.cost_model import CostModel
from specengine.drafting.pauses import LONGEST, SHARE, SHORT, Pauses, Trial
from specengine.drafting.tree_choice import cycle_seconds

COSTS = CostModel((1, 64), (0.01, 0.05))


def cycles(trial, count, tokens, seconds=0.0, nodes=20):
    """How many of them drafted, and the time of all against plain cycles'."""
    plain, drafted = cycle_seconds(COSTS, 1, 0, 0.0), cycle_seconds(COSTS, 1, nodes, 0.0) + seconds
    used, time, said = 0, 0.0, 0
    for _ in range(count):
        if trial.here():
            time, said = time + plain, said + 1
            trial.committed(1)
        else:
            trial.drafted(1, nodes, 0.0, seconds)
            trial.committed(tokens)
            used, time, said = used + 1, time + drafted, said + tokens
    return used, time / (said * plain)


def test_what_pays_is_always_used():
    used, relative = cycles(Trial(COSTS), 100, tokens=4)
    assert used == 100 and relative < 0.7


@pytest.mark.parametrize("seconds", [0.001, 0.1, 1.0])
def test_what_does_not_pay_costs_a_twentieth(seconds):
    used, relative = cycles(Trial(COSTS), 20_000, tokens=1, seconds=seconds)
    assert used >= 5 and 1 < relative < 1.06


def test_it_is_used_again_once_it_pays():
    trial = Trial(COSTS)
    assert cycles(trial, 500, tokens=1)[0] < 50
    assert cycles(trial, 500, tokens=5)[0] > 400


def test_a_cycle_of_others_says_nothing():
    trial = Trial(COSTS)
    trial.committed(1)
    assert not trial.here()


def uses_of(pauses, sequences, saved, cycles=4000) -> int:
    """How many of so many cycles used what saves so much of a plain one."""
    uses = 0
    for _ in range(cycles):
        if not pauses.here(sequences):
            pauses.weigh(sequences, saved, 1.0)
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
