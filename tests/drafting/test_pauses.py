import pytest

from specengine.drafting.cost_model import CostModel
from specengine.drafting.pauses import Trial
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
