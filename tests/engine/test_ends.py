"""Where a text may end: stop strings and stop tokens, and the tokens before which neither counts."""

import dataclasses

import pytest

from specengine import Engine, SamplingParams
from tests.constraints.vocabulary import TOKENIZER, talking_model

PROMPT = TOKENIZER.encode("name a thing", add_special_tokens=False)
LETTERS = {"logit_bias": dict.fromkeys(map(ord, "abcdefghij"), 50.0)}  # a character each
FREE = {"max_new_tokens": 40, "temperature": 0.9, "ignore_eos": True, "seed": 4, **LETTERS}


@pytest.fixture(scope="module")
def engines():
    return [Engine(talking_model(), drafter=name) for name in ("none", "prompt_lookup,adaptive=false")]


@pytest.mark.parametrize("least", [0, 1, 9, 21, 22, 39, 40])
def test_a_stop_string_ends_a_text_behind_the_least_tokens(engines, least):
    tokens = engines[0].generate(PROMPT, SamplingParams(**FREE)).token_ids
    texts = [TOKENIZER.decode(tokens[:count]) for count in range(41)]
    stops = [texts[22][-2:], texts[30][-1:]]  # the first begins in one token and ends in another
    ends = [
        (count, start)
        for count in range(least + 1, 41)
        for stop in stops
        for start in [texts[count].find(stop, max(0, len(texts[least]) + 1 - len(stop)))]
        if start >= 0
    ]
    count, start = min(ends, default=(40, None))
    for engine in engines:
        output = engine.generate(PROMPT, SamplingParams(**FREE, stop=stops, min_tokens=least))
        assert (len(output.token_ids), output.text) == (count, texts[count][:start])
        assert output.finish_reason == ("stop" if ends else "length")


def test_the_text_of_a_stop_token_is_not_part_of_it(engines):
    tokens = engines[0].generate(PROMPT, SamplingParams(**FREE)).token_ids
    end = tokens.index(tokens[20])
    for engine in engines:
        for skipped in (True, False):
            params = SamplingParams(**FREE, stop_token_ids=[tokens[20]], skip_special_tokens=skipped, stop=["never"])
            output = engine.generate(PROMPT, params)
            assert output.token_ids == tokens[: end + 1] and output.finish_reason == "stop"
            assert output.text == TOKENIZER.decode(tokens[:end], skip_special_tokens=skipped)
    with pytest.raises(ValueError, match=r"^stop_token_ids: token id 320 is not in 0 to 319"):
        engines[0].generate(PROMPT, SamplingParams(stop_token_ids=[320]))


@pytest.mark.parametrize("skipped", [True, False])
def test_the_text_of_an_end_token_that_is_not_special_is_not_part_of_it(engines, skipped):
    """As with files that name an end token without marking it as special."""
    tokens = engines[0].generate(PROMPT, SamplingParams(**FREE)).token_ids
    end = tokens.index(tokens[20])
    model = dataclasses.replace(talking_model(), eos_token_ids=frozenset({tokens[20]}))
    params = SamplingParams(**FREE | {"ignore_eos": False}, skip_special_tokens=skipped)
    output = Engine(model, drafter="none").generate(PROMPT, params)
    assert output.token_ids == tokens[: end + 1] and output.finish_reason == "stop"
    assert output.text == TOKENIZER.decode(tokens[:end], skip_special_tokens=skipped) != ""


def test_a_stop_token_cuts_a_constrained_text_unless_it_comes_too_early(engines):
    for engine in engines:
        cut = engine.generate(PROMPT, SamplingParams(choices=["yes, of"], stop_token_ids=[ord(",")]))
        assert (cut.text, cut.finish_reason) == ("yes", "stop")
        early = {"stop_token_ids": [ord("c")], "logit_bias": {ord("c"): 50.0}, "max_new_tokens": 20}
        assert engine.generate(PROMPT, SamplingParams(regex="ab?c|ab{3}d", **early)).text == "a"
        assert engine.generate(PROMPT, SamplingParams(regex="ab?c|ab{3}d", min_tokens=4, **early)).text == "abbbd"
        forced = SamplingParams(choices=["ac"], stop_token_ids=[ord("c")], min_tokens=4, max_new_tokens=20)
        assert engine.generate(PROMPT, forced).text == "a"
