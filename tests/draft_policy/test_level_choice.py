"""Whether one more level of drafts pays."""

import pytest

from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.level_choice import LevelChoice


@pytest.mark.parametrize("likely, seconds, width", [(0.9, 1e-9, 2), (0.9, 10.0, 0), (1e-4, 1e-9, 1)])
def test_a_level_pays_where_it_is_likely_and_cheap(likely, seconds, width):
    choice = LevelChoice(CostModel((1, 64), (1.0, 1.001)))
    for rows in (1, 2):
        choice.record(rows, seconds)
    assert choice.width_that_pays([[likely, likely / 2]], 1) == width
    assert choice.least_gain(1) == pytest.approx(seconds)
