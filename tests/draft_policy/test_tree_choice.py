"""How many nodes pay: acceptance as running averages, and the choice by costs."""

import random

import pytest

from specengine.draft_policy.acceptance import Acceptance
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.tree_size import nodes_that_pay
from specengine.draft_policy.width_choice import WidthChoice

FREE = CostModel((1, 64), (1.0, 1.0 + 1e-9))
DEAR = CostModel((1, 64), (1.0, 64.0))
STEP = CostModel((1, 4, 5, 64), (1.0, 1.05, 4.0, 400.0))


def test_averages_start_at_the_prior_and_follow_what_is_seen():
    rates = Acceptance((0.5, 0.1), weight=4, memory=20)
    assert rates.rates() == [0.5, 0.1]
    for _ in range(4):
        rates.observe(0, True)
    assert 0.7 < rates.rates()[0] < 0.8 and rates.rates()[1] == 0.1
    for _ in range(100):
        rates.observe(0, False)
    assert rates.rates()[0] < 0.1


def test_recent_observations_count_more():
    early, late = (Acceptance((0.5,), weight=1, memory=10) for _ in range(2))
    for step in range(40):
        early.observe(0, step < 20)
        late.observe(0, step >= 20)
    assert early.rates()[0] < 0.2 and late.rates()[0] > 0.8


def test_a_request_teaches_the_engine_and_the_engine_the_next_request():
    engine = Acceptance((0.5, 0.5), weight=4, memory=100)
    request = Acceptance(engine, weight=4, memory=20)
    for _ in range(30):
        request.observe(1, False)
    fresh = Acceptance(engine, weight=4, memory=20)
    assert request.rates()[1] < fresh.rates()[1] < 0.1
    assert fresh.rates()[0] == 0.5


def test_free_rows_that_are_accepted_are_all_taken():
    assert nodes_that_pay([[0.99] * 15], FREE) == [15]


def test_the_root_is_alone_where_rows_are_dear_or_nothing_is_accepted():
    assert nodes_that_pay([[0.9] * 15], DEAR) == [0]
    assert nodes_that_pay([[0.0] * 15], FREE) == [0]
    assert nodes_that_pay([[]], FREE) == [0]
    assert nodes_that_pay([], FREE) == []


def test_the_tree_ends_where_the_next_row_costs_more_than_it_brings():
    assert nodes_that_pay([[0.9, 0.8, 0.7, 0.6, 0.5]], STEP) == [3]


def test_a_dear_row_may_pay_together_with_those_after_it():
    stairs = CostModel((1, 2, 8, 9, 64), (1.0, 1.9, 1.9, 9.0, 99.0))
    assert nodes_that_pay([[0.8]], stairs) == [0]
    assert nodes_that_pay([[0.8] * 7], stairs) == [7]


def test_requests_of_a_batch_compete_for_the_rows():
    assert nodes_that_pay([[0.9, 0.8], [0.1], [0.8, 0.7]], CostModel((1, 5, 6, 64), (1.0, 1.0, 4.0, 400.0))) == [
        1,
        0,
        1,
    ]
    assert nodes_that_pay([[0.9, 0.8], [0.1], [0.8, 0.7]], CostModel((1, 7, 8, 64), (1.0, 1.0, 4.0, 400.0))) == [
        2,
        0,
        2,
    ]
    alone = nodes_that_pay([[0.9] * 6], STEP)
    together = nodes_that_pay([[0.9] * 6] * 4, STEP)  # four roots fill the cheap rows
    assert alone == [3] and together == [0] * 4


def test_one_sequence_takes_no_rows_for_which_many_others_wait():
    costs = CostModel((1, 64), (1.0, 7.3))
    assert nodes_that_pay([[0.99] * 15], costs) == [15]
    assert nodes_that_pay([[0.99] * 15, *[[]] * 15], costs)[0] < 3


def test_a_long_prefix_makes_trees_smaller():
    costs = CostModel((1, 64), (1.0, 1.1), (1e-5, 64e-5))
    assert nodes_that_pay([[0.5] * 8], costs, 10) == [8]
    assert nodes_that_pay([[0.5] * 8], costs, 1_000_000) == [0]


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_best_of_all_there_are(seed):
    draw = random.Random(seed)
    nodes = [sorted((draw.random() for _ in range(4)), reverse=True) for _ in range(2)]
    costs = CostModel((1, 2, 4, 8, 16), tuple(sorted(draw.uniform(1, 4) for _ in range(5))))

    def value(counts):
        cycles = sum(1 / (1 + sum(each[:count])) for each, count in zip(nodes, counts, strict=True))
        return cycles * float(costs(2 + sum(counts)))

    best = min(((a, b) for a in range(5) for b in range(5)), key=value)
    assert value(nodes_that_pay(nodes, costs)) == pytest.approx(value(best), rel=1e-3)  # host time aside


WIDTHS, SECONDS = (1, 2, 4, 8), (1.0, 1.05, 1.06, 1.5)


@pytest.mark.parametrize(("accepted", "width"), [(3, 4), (7, 8), (0, 1)])
def test_the_width_of_a_chain_follows_what_is_accepted_and_what_it_takes(accepted, width):
    choice = WidthChoice(8)
    assert choice.choose(WIDTHS, SECONDS) == 4  # by the prior
    for _ in range(300):
        choice.observe(8, 7, accepted)
    assert choice.choose(WIDTHS, SECONDS) == width


def test_where_nothing_pays_one_cycle_in_many_still_tries():
    choice = WidthChoice(8)
    for _ in range(300):
        choice.observe(2, 0, 0)  # nothing was found: as good as refused
    chosen = [choice.choose(WIDTHS, SECONDS) for _ in range(4 * WidthChoice.PROBE)]
    assert chosen.count(2) == 4 and chosen.count(1) == len(chosen) - 4
    assert WidthChoice(1).choose((1,), (1.0,)) == 1


def test_a_narrow_tree_is_not_believed_to_be_accepted_as_deep_as_a_wide_one():
    choice = WidthChoice(8)
    for _ in range(200):
        for width, accepted in ((2, 0), (4, 0), (8, 3)):
            choice.observe(width, width - 1, accepted)
    assert choice.choose(WIDTHS, SECONDS) == 8  # by one rate for all widths it was 4
