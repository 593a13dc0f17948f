"""The warning about a drafter that guesses nothing."""

import warnings

from specengine.drafters.acceptance_watch import CYCLES, AcceptanceWatch


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
