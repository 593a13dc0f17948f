"""The choice among captured tree widths."""

import pytest

from specengine.draft_policy.width_choice import WidthChoice

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
