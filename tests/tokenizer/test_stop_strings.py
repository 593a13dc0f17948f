"""Stop strings in text that arrives in pieces."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.tokenizer import StopStrings


def test_a_stop_string_is_found_across_token_borders():
    stops = StopStrings(["\n\nUser:"])
    assert stops.feed("Hi.\n") == ("Hi.", False)
    assert stops.feed("\nUs") == ("", False)
    assert stops.feed("er: more") == ("", True)
    assert (stops.matched, stops.finish()) == ("\n\nUser:", "")


def test_text_held_back_in_vain_is_given_out():
    stops = StopStrings(["aab"])
    assert stops.feed("xaa") == ("x", False)
    assert stops.feed("a") == ("a", False)
    assert stops.feed("c") == ("aac", False)
    assert stops.feed("a") == ("", False)
    assert stops.finish() == "a"


def test_the_stop_that_ends_first_wins_and_then_the_longest():
    assert StopStrings(["abcd", "bc"]).feed("abcd") == ("a", True)
    assert StopStrings(["b", "ab"]).feed("xab") == ("x", True)


def test_nothing_is_given_out_after_a_stop():
    stops = StopStrings(["."])
    assert stops.feed("a.b") == ("a", True)
    assert stops.feed("c") == ("", True)
    assert stops.finish() == ""


def test_without_stop_strings_text_passes_through():
    stops = StopStrings([])
    assert (stops.feed("abc"), stops.finish(), stops.matched) == (("abc", False), "", None)


@settings(max_examples=300)
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    early=st.integers(0, 3),
)
def test_any_split_stops_where_a_search_of_the_whole_text_does(stops, pieces, early):
    """No stop string may end in the first `early` pieces."""
    text, least = "".join(pieces), len("".join(pieces[:early]))
    places = [(text.find(stop, max(0, least + 1 - len(stop))), stop) for stop in stops]
    found = [(at + len(stop), at) for at, stop in places if at >= 0]
    matcher, emitted, fed, stopped_at = StopStrings(stops), "", "", None
    for number, piece in enumerate(pieces):
        fed += piece
        emit, stopped = matcher.feed(piece, may_end=number >= early)
        emitted += emit
        if stopped:
            stopped_at = len(fed)
            break
        assert fed.startswith(emitted) and len(fed) - len(emitted) < max(map(len, stops), default=1)
    emitted += matcher.finish()
    if not found:
        assert (emitted, stopped_at) == (text, None)
    else:
        end, start = min(found)
        assert emitted == text[:start]
        assert stopped_at is not None
        assert stopped_at - len(piece) < end <= stopped_at
