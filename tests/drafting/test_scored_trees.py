import warnings

import pytest

from specengine.drafting.acceptance_watch import CYCLES, AcceptanceWatch
from specengine.drafting.cost_model import CostModel
from specengine.drafting.scored_trees import ScoredTree, TreeCutter

CHAIN = ScoredTree([1, 2, 3], [-1, 0, 1], [1.0, 0.5, 0.5])


@pytest.mark.filterwarnings("ignore:drafter")
def test_what_stopped_paying_is_drafted_again_once_it_would_have_paid():
    cutter = TreeCutter(CostModel((1, 2, 4), (1.0, 1.1, 1.4)))

    def cycles(committed, count):
        for _ in range(count):
            (drafted,) = cutter.cut([CHAIN], 0.0)
            cutter.observe(drafted, committed)
        return len(drafted.tree.tokens)

    assert cycles([2, 3, 4], 1) > 1
    assert cycles([9], 300) == 1
    assert cycles([2, 3, 4], 300) == 3


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
