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


@pytest.mark.filterwarnings("ignore:drafter")
@pytest.mark.parametrize(
    "committed, seconds, share", [([2, 3, 4], 0.1, 1.0), ([9], 0.1, 1 / 16), ([2, 3, 4], 5.0, 1 / 16)]
)
def test_what_never_pays_for_its_drafting_is_hardly_drafted(committed, seconds, share):
    cutter, drafts = TreeCutter(CostModel((1, 2, 4), (1.0, 1.1, 1.4))), 0
    for _ in range(800):
        if not cutter.pauses():
            (drafted,) = cutter.cut([CHAIN], 0.0, seconds)
            cutter.observe(drafted, committed)
            drafts += 1
    assert drafts / 800 == pytest.approx(share, abs=0.06)


@pytest.mark.filterwarnings("ignore:drafter")
def test_a_drafter_that_pays_again_is_asked_again_every_cycle():
    cutter, drafted_of_late = TreeCutter(CostModel((1, 2, 4), (1.0, 1.1, 1.4))), 0
    for cycle in range(900):
        if not cutter.pauses():
            (drafted,) = cutter.cut([CHAIN], 0.0, 0.2)
            cutter.observe(drafted, [9] if cycle < 300 else [2, 3, 4])
            drafted_of_late += cycle >= 800
    assert drafted_of_late == 100


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
