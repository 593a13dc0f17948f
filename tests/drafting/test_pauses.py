import pytest

from specengine.drafting.cost_model import CostModel
from specengine.drafting.pauses import FEWEST, LONGEST, ROUNDS, SHARE, SHORT, TRIED, Newcomers, Pauses, Trial
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
def test_what_does_not_pay_costs_a_fiftieth(seconds):
    trial = Trial(COSTS)
    cycles(trial, 5_000, tokens=1, seconds=seconds)  # until it is known
    used, relative = cycles(trial, 50_000, tokens=1, seconds=seconds)
    assert used >= 5 and 1 < relative < 1.025


def test_prompts_that_were_read_for_what_does_not_pay_count():
    trial = Trial(COSTS)
    plain = cycle_seconds(COSTS, 1, 0, 0.0)
    for _ in range(20):
        trial.drafted(1, 20, 0.0, 0.0)
        trial.committed(1)
    pauses = []
    for prompts in (0, 10, 0):
        trial.read(1, 0.0, prompts * plain)
        trial.drafted(1, 20, 0.0, 0.0)
        trial.committed(1)
        pauses.append(next(i for i in range(10_000) if not trial.here()))
    assert pauses[1] == pytest.approx(pauses[0] + 500, abs=1) and pauses[2] == pytest.approx(pauses[0], abs=1)


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


def resting(batch, cycles=1200):
    newcomers = Newcomers()
    for _ in range(cycles):
        newcomers.cycle(batch, False)
    return newcomers


@pytest.mark.parametrize("batch", [1, 2, 8, 16, 56])
def test_where_nothing_is_drafted_one_whole_batch_in_several_is_read(batch):
    newcomers, rounds = resting(batch), min(max(FEWEST, batch), ROUNDS)
    whole = [{newcomers.unread(batch) for _ in range(batch)} for _ in range(2 * rounds)]
    assert whole == 2 * ([{True}] * (rounds - 1) + [{False}])


@pytest.mark.parametrize(("batch", "cycles"), [(1, 1100), (4, 280), (56, 60)])
def test_it_takes_longer_to_leave_few_unread(batch, cycles):
    assert not any(resting(batch, cycles).unread(batch) for _ in range(100))
    assert resting(batch, 2 * cycles).unread(batch)


def test_newcomers_are_read_while_some_cycles_draft_and_once_they_do_again():
    newcomers = resting(16)
    assert newcomers.unread(16) and not newcomers.unread(4)  # of other sizes nothing is known
    for cycle in range(1000):
        newcomers.cycle(16, cycle % 5 == 0)
        if cycle > 50:
            assert not newcomers.unread(16)


def test_what_gains_once_is_used_again_at_once():
    pauses = Pauses()
    uses_of(pauses, 1, -1.0, 300)
    while pauses.here(1):
        pass
    pauses.weigh(1, 0.1, 1.0)
    assert not pauses.here(1)
    pauses.weigh(1, -0.1, 1.0)
    assert pauses.here(1)


def test_nothing_pauses_before_it_was_tried():
    pauses = Pauses()
    for _ in range(TRIED):
        assert not pauses.here(1)
        pauses.weigh(1, -1.0, 1.0)
    assert pauses.here(1)


def test_one_bad_draft_behind_a_long_prompt_pauses_little():
    trial = Trial(COSTS)
    trial.read(1, 0.0, 30 * cycle_seconds(COSTS, 1, 0, 0.0))
    assert cycles(trial, 1, tokens=1)[0] == 1
    assert cycles(trial, 128, tokens=4)[0] > 80
