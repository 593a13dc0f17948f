"""TextCorpus against a search through the whole text."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine._C import CONTINUATION_KINDS, DEEPEST, MATCHED, TextCorpus, sort_suffixes
from tests.pools.searching import WHOLE, followers, kind

texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=3)


def corpus(pieces, narrow=False):
    tokens = torch.tensor([token for piece in pieces for token in (*piece, -1)], dtype=torch.int32)
    order = torch.empty_like(tokens)
    sort_suffixes(tokens, order)
    return TextCorpus(tokens.to(torch.uint16) if narrow else tokens, order)


def test_suffixes_are_sorted_as_far_as_they_are_compared():
    random.seed(0)
    tokens = [random.choice([-1, 0, 1, 2]) for _ in range(300)] + [1] * 200
    order = torch.empty(500, dtype=torch.int32)
    sort_suffixes(torch.tensor(tokens, dtype=torch.int32), order)
    most = MATCHED + DEEPEST
    assert order.tolist() == sorted(range(500), key=lambda i: (tokens[i : i + most], i))


def test_the_order_of_equals_is_their_length_then_their_place():
    order = torch.empty(4, dtype=torch.int32)
    sort_suffixes(torch.tensor([7, 7, 7, 7], dtype=torch.int32), order)
    assert order.tolist() == [3, 2, 1, 0]


@given(texts, st.integers(1, 4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_first_level_is_what_followed_the_longest_context(pieces, width, elsewhere):
    context = [0, 1, 0, 2, 3, 3, 1] if elsewhere else pieces[0][-12:]
    tokens, parents, kinds = corpus(pieces).continuations(context, 1 + width, 1, width, WHOLE, 0.0)
    joined = [token for piece in pieces for token in (*piece, -1)]
    places = {n: joined_count(joined, context[-n:]) for n in range(1, len(context) + 1)}
    length = max((n for n, count in places.items() if count), default=0)
    found = {token: count for token, (count, _) in followers(pieces, context[-length:]).items()} if length else {}
    # as many as are looked at one by one
    if places.get(length, 0) <= 32:
        ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:width]
        every = sum(found.values())
        expected = [(token, kind(length, count, every, i == 0)) for i, (token, count) in enumerate(ranked)]
        assert list(zip(tokens, kinds, strict=True))[1:] == expected
    assert set(tokens[1:]) <= set(found) and set(parents[1:]) <= {0}


@given(texts, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_tokens_of_two_bytes_are_the_same_corpus(pieces, width):
    asked = (pieces[0][-12:], 24, 8, width, WHOLE, 0.0)
    assert corpus(pieces, narrow=True).continuations(*asked) == corpus(pieces).continuations(*asked)


def joined_count(joined, string):
    return sum(joined[i : i + len(string)] == string for i in range(len(joined)))


def test_a_branch_goes_on_in_the_places_where_it_occurred():
    random.seed(1)
    pieces = [[1, 2, random.choice([3, 4, 5]), *(random.choices(range(6, 9), k=6))] for _ in range(500)]
    tokens, parents, _ = corpus(pieces).continuations([9, 1, 2], 40, 4, 3, WHOLE, 0.0)
    strings = {tuple(piece[2 : 2 + n]) for piece in pieces for n in range(1, 5)}
    paths = {0: ()}
    for node in range(1, len(tokens)):
        paths[node] = (*paths[parents[node]], tokens[node])
        assert paths[node] in strings
    assert {paths[node] for node in range(1, 4)} <= {(3,), (4,), (5,)} | {p for p in paths.values() if len(p) > 1}
    # of a few hundred occurrences some are looked at: the most frequent token is among the first
    assert set(corpus(pieces).continuations([9, 1, 2], 4, 1, 3, WHOLE, 0.0)[0][1:]) == {3, 4, 5}


def test_what_a_damaged_file_holds_is_never_read_past():
    random.seed(2)
    for _ in range(200):
        n = random.randint(0, 60)
        tokens = torch.tensor([random.randint(-(2**31), 2**31 - 1) % 5 for _ in range(n)], dtype=torch.int32)
        order = torch.tensor([random.randint(-(2**31), 2**31 - 1) for _ in range(n)], dtype=torch.int32)
        order[: n // 2] %= max(1, n)
        tree = TextCorpus(tokens, order).continuations([1, 2, 3], 32, 8, 4, WHOLE, 0.0)
        assert len(tree[0]) <= 32 and all(parent < node for node, parent in enumerate(tree[1]))


def test_what_is_no_corpus_is_refused():
    tokens = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="order: "):
        TextCorpus(tokens, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="tokens: "):
        sort_suffixes(tokens.long(), tokens)
    with pytest.raises(ValueError, match="rates: "):
        TextCorpus(tokens, tokens).continuations([1], 4, 4, 4, [1.0] * (CONTINUATION_KINDS + 1), 0.0)


def test_the_tensors_live_as_long_as_the_corpus():
    made = corpus([[1, 2, 3]] * 5)  # its tensors have no other owner
    assert made.continuations([1], 3, 2, 1, WHOLE, 0.0)[0] == [1, 2, 3] and len(made) == 20
