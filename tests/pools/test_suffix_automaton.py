"""SuffixAutomaton against a search through the whole text."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine._C import CONTINUATION_KINDS, SuffixAutomaton
from tests.pools.searching import WHOLE, followers, kind

texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=3)


def automaton(pieces):
    """Of texts that do not follow each other."""
    made = SuffixAutomaton()
    for piece in pieces:
        made.append(piece)
        made.cut()
    return made


@given(texts)
@settings(max_examples=300, deadline=None)
def test_counts_are_those_of_a_search(pieces):
    made = automaton(pieces)
    assert len(made) == sum(map(len, pieces))
    strings = {tuple(piece[i : i + n]) for piece in pieces for n in (1, 2, 3, 7, 20) for i in range(len(piece) - n + 1)}
    for string in [*map(list, strings), [4], [0, 4], [3, 3, 3, 3, 3, 3, 3, 3, 3]]:
        there = sum(
            piece[i : i + len(string)] == string for piece in pieces for i in range(len(piece) - len(string) + 1)
        )
        assert made.count(string) == there


@given(texts, st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_the_first_level_is_what_followed_longest_contexts_first_then_most_frequent(pieces, width):
    made, context = automaton(pieces), pieces[-1][-12:]
    tokens, parents, kinds = made.continuations(context, 1 + width, 1, width, WHOLE, 0.0)
    assert (tokens[0], parents[0]) == (context[-1], -1) and set(parents[1:]) <= {0}
    expected, longest = [], next((n for n in range(len(context), 0, -1) if followers(pieces, context[-n:])), 0)
    # Contexts that occur in the same places are one: the longest counts.
    places = None
    for n in range(longest, 0, -1):
        found = followers(pieces, context[-n:])
        count = sum(piece[i : i + n] == context[-n:] for piece in pieces for i in range(len(piece) - n + 1))
        if count == places:
            continue
        places = count
        every = sum(c for c, _ in found.values())
        for token, (c, _) in sorted(found.items(), key=lambda item: item[1], reverse=True):
            if token not in [t for t, _ in expected]:
                expected.append((token, kind(n, c, every, not expected)))
    assert list(zip(tokens, kinds, strict=True))[1:] == expected[:width]


def test_a_tree_goes_on_as_the_text_did_and_takes_the_likeliest_nodes():
    made = automaton([[1, 2, 3, 9, 1, 2, 4, 1, 2]])
    tokens, parents, _ = made.continuations([4, 1, 2], 16, 8, 4, WHOLE, 0.0)
    paths = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths[node] = (*paths.get(parent, ()), token)
    assert {(2, 3, 9, 1, 2), (2, 4, 1, 2)} <= set(paths.values())
    rates = list(WHOLE)
    for each in range(CONTINUATION_KINDS):
        rates[each] = 0.9 if each % 6 < 4 else 0.1  # second branches are unlikely
    tokens, parents, kinds = made.continuations([4, 1, 2], 5, 8, 4, rates, 0.0)
    assert parents == [-1, 0, 1, 2, 3] and len(tokens) == 5  # a chain of first branches: 0.9 ** 4 > 0.1
    assert all(each % 6 < 4 for each in kinds[1:])
    assert len(made.continuations([4, 1, 2], 16, 8, 4, [0.5] * CONTINUATION_KINDS, 0.3)[0]) < 8
    assert made.continuations([77], 16, 8, 4, WHOLE, 0.0) == ([77], [-1], [-1])


def test_a_loop_is_drafted_as_long_as_asked_for():
    made = SuffixAutomaton()
    made.append([5, 6, 7] * 40)
    tokens, parents, kinds = made.continuations(([5, 6, 7] * 40)[-32:], 16, 32, 2, WHOLE, 0.0)
    assert tokens == ([7, 5, 6] * 6)[:16] and parents == list(range(-1, 15))
    assert set(kinds[1:]) == {6 * 4 + 1}


def test_memory_of_a_token_does_not_grow_with_the_text():
    random.seed(0)
    made = SuffixAutomaton()
    for _ in range(40):
        made.append([random.randrange(50) for _ in range(200)] + [7] * 800)
    assert made.bytes < 200 * len(made)


def test_what_is_no_text_is_refused():
    made = SuffixAutomaton()
    with pytest.raises(ValueError, match="token: expected an id, got -1"):
        made.append([3, -1])
    with pytest.raises(ValueError, match="context: "):
        made.continuations([], 4, 4, 4, WHOLE, 0.0)
    with pytest.raises(ValueError, match="rates: expected 30, got 1"):
        made.continuations([3], 4, 4, 4, [0.5], 0.0)
    with pytest.raises(ValueError, match="string: expected 1 to 64 tokens, got 0"):
        made.count([])
