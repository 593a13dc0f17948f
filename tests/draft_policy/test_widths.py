"""The choice among captured tree widths."""

import pytest

from specengine.draft_policy import widths
from specengine.draft_policy.widths import WidthPolicy

WIDTHS, SECONDS = (1, 2, 4, 8), (1.0, 1.05, 1.06, 1.5)


@pytest.mark.parametrize(("accepted", "width"), [(3, 4), (7, 8), (0, 1)])
def test_the_width_of_a_chain_follows_what_is_accepted_and_what_it_takes(accepted, width):
    policy = WidthPolicy(8)
    assert policy.choose(WIDTHS, SECONDS) == 4  # by the prior
    for _ in range(300):
        policy.observe(8, 7, accepted)
    assert policy.choose(WIDTHS, SECONDS) == width


def time_lost(cycles=4000):
    policy = WidthPolicy(8)
    for _ in range(300):
        policy.observe(2, 0, 0)  # nothing was found: as good as refused
    taken = 0.0
    for _ in range(cycles):
        width = policy.choose(WIDTHS, SECONDS)
        taken += SECONDS[WIDTHS.index(width)]
        if width > 1:
            policy.observe(width, 0, 0)
    return taken / cycles - 1


def test_where_nothing_pays_wider_trees_are_explored_for_a_hundredth_of_the_time(monkeypatch):
    assert 0.005 < time_lost() <= 0.0101
    monkeypatch.setattr(widths, "EXPLORED", 0.04)
    assert time_lost() > 0.02


def test_a_width_that_never_loses_and_a_single_width_need_no_exploration():
    assert WidthPolicy(1).choose((1,), (1.0,)) == 1
    policy = WidthPolicy(8)
    for _ in range(300):
        policy.observe(8, 7, 7)
    assert {policy.choose(WIDTHS, SECONDS) for _ in range(100)} == {8}


def test_a_narrow_tree_is_not_believed_to_be_accepted_as_deep_as_a_wide_one():
    policy = WidthPolicy(8)
    for _ in range(200):
        for width, accepted in ((2, 0), (4, 0), (8, 3)):
            policy.observe(width, width - 1, accepted)
    assert policy.choose(WIDTHS, SECONDS) == 8  # by one rate for all widths it was 4


def test_of_widths_that_take_as_long_per_token_the_narrowest_is_chosen():
    # by the prior, half of the tokens at each depth are accepted: widths 2 and 3 take one second per token
    assert WidthPolicy(8).choose((1, 2, 3), (10.0, 1.5, 1.75)) == 2
    assert WidthPolicy(8).choose((1, 2, 3), (10.0, 1.5, 1.74)) == 3
