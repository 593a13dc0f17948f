"""NgramIndex against the same in Python."""

from random import Random

import pytest

from specengine._C import NgramIndex
from specengine.drafters.prompt_lookup.drafter import PRIOR
from tests.pools.prompt_lookup import SlowIndex


def grown(index: NgramIndex, tokens: list[int]) -> NgramIndex:
    index.append(tokens[len(index) :])
    return index


def test_drafts_and_verdicts_are_those_of_the_reference():
    sizes = set()
    for seed in range(120):
        draw = Random(seed)
        least = draw.choice([1, 1, 2, 5, 20])
        ngrams = least, least + draw.choice([0, 3, 12])
        index, slow = NgramIndex(*ngrams), SlowIndex(*ngrams)
        vocabulary = draw.choice([1, 2, 5, 30])
        tokens = [draw.randrange(vocabulary) for _ in range(draw.choice([1, 5, 300]))]
        for _ in range(12):
            tokens += tokens[-draw.choice([1, 6, 40]) :] if draw.random() < 0.3 else [draw.randrange(vocabulary)]
            rates = draw.choice([PRIOR, [draw.random() for _ in PRIOR], [0.5] * len(PRIOR)])
            sizing = draw.choice([1, 4, 50]), draw.choice([2, 16, 64]), draw.choice([0, 3, 15]), rates
            floor = draw.choice([0.0, 0.01, 0.3])
            drafted = grown(index, tokens).draft(*sizing, floor)
            assert drafted == slow.draft(tokens, *sizing, floor), seed
            sizes.add(len(drafted[0]))
            text = drafted[0][1 : draw.randint(1, 5)] + [draw.randrange(vocabulary) for _ in range(3)]
            assert index.judge(text) == slow.judge(text), seed
    assert len(sizes) > 20


def test_a_skipped_draft_is_not_judged():
    index = grown(NgramIndex(1, 4), [1, 2, 3, 1])
    index.draft(4, 16, 8, PRIOR, 0.0)
    assert index.judge([2, 9]) == [(0, True), (2, False)]
    index.skip()
    assert index.judge([2, 9]) == []


def test_what_is_no_index_is_refused():
    for ngrams in ((0, 4), (3, 2), (1, 33)):
        with pytest.raises(ValueError, match="min_ngram: expected 1 <= min_ngram <= max_ngram <= 32"):
            NgramIndex(*ngrams)
    with pytest.raises(ValueError, match="tokens: expected at least one"):
        NgramIndex(1, 4).draft(4, 16, 8, PRIOR, 0.0)
    with pytest.raises(ValueError, match="rates: expected 10, got 3"):
        grown(NgramIndex(1, 4), [1]).draft(4, 16, 8, [0.5] * 3, 0.0)
