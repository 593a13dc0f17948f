"""How calibration and cutting work together."""

import pytest

from specengine.draft_policy.acceptance import Calibration
from specengine.draft_trees.cut import cut_trees
from specengine.draft_trees.scored_tree import ScoredTree

CHAIN = ScoredTree([1, 2, 3], [-1, 0, 1], [1.0, 0.5, 0.5])


def test_chances_are_the_drafter_s_until_they_are_judged_and_then_the_judgement_s():
    calibration = Calibration()
    assert calibration([0.15, 0.55]) == pytest.approx([0.15, 0.55])
    for step in range(3000):
        calibration.observe(ScoredTree([1, 2], [-1, 0], [1.0, 0.55]), [2 if step % 10 else 9])
    assert calibration([0.55]) == pytest.approx([0.9], abs=0.02)
    assert calibration([0.15]) == pytest.approx([0.15])


def test_what_stopped_paying_is_drafted_again_once_it_would_have_paid():
    calibration = Calibration()

    def cycles(committed, count):
        for _ in range(count):
            own = ScoredTree(CHAIN.tokens, CHAIN.parents, calibration(CHAIN.chances))
            (left,) = cut_trees([own], 1.0, lambda nodes: 1 + 0.1 * nodes, 8)
            calibration.observe(CHAIN, committed)
        return len(left.tokens)

    assert cycles([2, 3, 4], 1) > 1
    assert cycles([9], 300) == 1
    assert cycles([2, 3, 4], 300) == 3
