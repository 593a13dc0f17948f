"""How many nodes pay, and which nodes a cut tree keeps."""

import random

import pytest

from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.cut_trees import cut_trees, nodes_that_pay
from specengine.draft_trees.scored_tree import ScoredTree

FREE = CostModel((1, 64), (1.0, 1.0 + 1e-9))
DEAR = CostModel((1, 64), (1.0, 64.0))
STEP = CostModel((1, 4, 5, 64), (1.0, 1.05, 4.0, 400.0))


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


def test_a_tree_keeps_its_likeliest_nodes_with_their_parents():
    tree = ScoredTree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2], [1.0, 0.2, 0.7, 0.99, 0.6])
    free = CostModel((1, 64), (1.0, 1.0 + 1e-9))
    for most, left in ((4, [1, 2, 3, 4, 5]), (3, [1, 2, 3, 5]), (2, [1, 3, 5]), (1, [1, 3]), (0, [1])):
        cut = cut_trees([tree], None, most=most)
        assert (list(cut.trees[0].tokens), cut.nodes) == (left, most)
    assert cut_trees([tree], None, most=2).expected == pytest.approx(1 + 0.7 + 0.42)
    assert cut_trees([tree], free).nodes == 4
    assert cut_trees([tree], CostModel((1, 2), (1.0, 9.0))).nodes == 0
