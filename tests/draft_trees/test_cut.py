"""Which nodes a cut tree keeps: those that bring more than the price of their rows."""

import random
from itertools import product

import pytest

from specengine.draft_trees.cut import cut_trees, expected_tokens
from specengine.draft_trees.scored_tree import ScoredTree
from tests.drafters.leaf_paths import paths


def chain(*chances):
    return ScoredTree(range(len(chances) + 1), range(-1, len(chances)), [1.0, *chances])


def kept(trees, price, seconds, most=64):
    return [len(tree.tokens) - 1 for tree in cut_trees(trees, price, seconds, most)]


def test_a_node_stays_exactly_where_its_chance_exceeds_the_price_of_its_row():
    tree = chain(0.8, 0.5, 0.5)  # reached with 0.8, 0.4 and 0.2
    for price, left in ((0.5, 3), (1.9, 3), (2.1, 2), (3.9, 2), (4.1, 1), (7.9, 1), (8.1, 0)):
        assert kept([tree], price, lambda nodes: 1 + 0.1 * nodes) == [left]


def test_free_rows_are_all_taken_and_rows_without_a_chance_never():
    assert kept([chain(*[0.99] * 15)], 1.0, lambda nodes: 1.0) == [15]
    assert kept([chain(*[0.0] * 15)], 1.0, lambda nodes: 1.0) == [0]
    assert kept([ScoredTree.root(3)], 1.0, lambda nodes: 1.0 + nodes) == [0]


def test_a_dear_row_may_pay_together_with_those_after_it():
    def stairs(nodes):
        return 1.0 if nodes == 0 else 1.9 if nodes < 8 else 9.0

    assert kept([chain(0.8)], 1.0, stairs) == [0]
    assert kept([chain(0.8, 0.9, 0.9)], 1.0, stairs) == [3]


def test_requests_of_a_batch_compete_for_the_rows():
    trees = [chain(0.9, 0.8), chain(0.1), chain(0.8, 0.7)]
    assert kept(trees, 1.0, lambda nodes: 1.0 + max(0, nodes - 2)) == [1, 0, 1]
    assert kept(trees, 1.0, lambda nodes: 1.0 + max(0, nodes - 4)) == [2, 0, 2]


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_best_of_all_there_are(seed):
    draw = random.Random(seed)
    trees = [chain(*(draw.random() for _ in range(4))) for _ in range(2)]
    steps = sorted(draw.uniform(1, 3) for _ in range(9))

    def value(counts):
        expected = 0.0
        for tree, count in zip(trees, counts, strict=True):
            reach = 1.0
            for chance in tree.chances[1 : count + 1]:
                reach *= chance
                expected += reach
        return expected - steps[sum(counts)]

    best = max(map(value, product(range(5), repeat=2)))
    assert value(kept(trees, 1.0, steps.__getitem__)) == pytest.approx(best)


def test_a_tree_keeps_its_likeliest_nodes_with_their_parents():
    tree = ScoredTree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2], [1.0, 0.2, 0.7, 0.99, 0.6])
    for most, left in ((4, [1, 2, 3, 4, 5]), (3, [1, 2, 3, 5]), (2, [1, 3, 5]), (1, [1, 3]), (0, [1])):
        assert cut_trees([tree], 0.0, float, most)[0].tokens == left
    assert paths(cut_trees([tree], 0.0, float, 2)[0]) == [[3, 5]]


def test_a_cut_tree_expects_the_chances_of_the_nodes_that_it_keeps():
    tree = ScoredTree(range(5), [-1, 0, 0, 2, 1], [1.0, 0.2, 0.7, 0.9, 0.5])  # reached with 0.2, 0.7, 0.63 and 0.1
    expected = {0: 0.0, 1: 0.7, 2: 1.33, 3: 1.53, 4: 1.63}
    for most, tokens in expected.items():
        cut = cut_trees([tree, chain(0.25)], 0.0, float, most)
        assert expected_tokens([tree, chain(0.25)], cut) == pytest.approx(tokens + 0.25 * (most > 0))
