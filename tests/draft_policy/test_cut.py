import warnings

import pytest

from specengine.draft_policy.acceptance_watch import CYCLES, AcceptanceWatch
from specengine.draft_policy.calibration import Calibration
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.tree_size import cut_trees
from specengine.draft_trees.scored_tree import ScoredTree, judge_nodes

CHAIN = ScoredTree([1, 2, 3], [-1, 0, 1], [1.0, 0.5, 0.5])
COSTS = CostModel((1, 2, 4), (1.0, 1.1, 1.4))


def kept(tree, chances, **options) -> list[int]:
    (left,) = cut_trees([ScoredTree(tree.tokens, tree.parents, chances)], COSTS, **options).trees
    return list(left.tokens)


@pytest.mark.filterwarnings("ignore:drafter")
def test_what_stopped_paying_is_drafted_again_once_it_would_have_paid():
    calibration = Calibration()

    def cycles(committed, count):
        for _ in range(count):
            nodes = kept(CHAIN, calibration(CHAIN.chances))
            calibration.observe(CHAIN, committed)
        return len(nodes)

    assert cycles([2, 3, 4], 1) > 1
    assert cycles([9], 300) == 1
    assert cycles([2, 3, 4], 300) == 3


def test_a_tree_keeps_its_likeliest_nodes_with_their_parents():
    tree = ScoredTree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2], [1.0, 0.2, 0.7, 0.99, 0.6])
    free = CostModel((1, 64), (1.0, 1.0 + 1e-9))
    for most, left in ((4, [1, 2, 3, 4, 5]), (3, [1, 2, 3, 5]), (2, [1, 3, 5]), (1, [1, 3]), (0, [1])):
        cut = cut_trees([tree], None, most=most)
        assert (list(cut.trees[0].tokens), cut.nodes) == (left, most)
    assert cut_trees([tree], None, most=2).expected == pytest.approx(1 + 0.7 + 0.42)
    assert cut_trees([tree], free).nodes == 4
    assert cut_trees([tree], CostModel((1, 2), (1.0, 9.0))).nodes == 0


def test_judged_are_the_children_of_what_was_accepted():
    tree = ScoredTree([7, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 2, 3], [1.0] * 6)
    assert list(judge_nodes(tree, [2, 9])) == [(1, False), (2, True), (4, False)]
    assert list(judge_nodes(tree, [1, 3])) == [(1, True), (2, False), (3, True)]
    assert list(judge_nodes(tree, [])) == []


def watched(guesses):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        watch = AcceptanceWatch("x")
        for guessed in guesses:
            watch.observe(guessed)
    return seen


def test_only_a_drafter_that_hardly_ever_guesses_is_warned_of():
    assert not watched([False] * (CYCLES - 1))
    (warning,) = watched([False] * 3 * CYCLES)
    assert str(warning.message).startswith(f"drafter x: 0 of its first {CYCLES} guesses were right. Usual causes: ")
    assert len(watched([True] + [False] * CYCLES)) == 1
    assert not watched([True, True] + [False] * CYCLES)
    assert not watched([True] * CYCLES + [False] * 500)
