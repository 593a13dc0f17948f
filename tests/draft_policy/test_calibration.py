"""How calibration and cutting work together."""

import pytest

from specengine.draft_policy.calibration import Calibration
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.cut_trees import cut_trees
from specengine.draft_trees.scored_tree import ScoredTree

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
