"""Texts are attributed to tokens and proposers across stop strings, characters of several tokens, and ends."""

import dataclasses

import pytest

from specengine import Engine, SamplingParams
from specengine.server.logprobs import chat_logprobs, completion_logprobs
from specengine.server.token_attribution import TokenAttribution, proposers_of
from specengine.types import CycleTrace, StreamEvent, TokenLogprob
from tests.server.servers import chat_model, plain_engine

TOKENIZER = chat_model().tokenizer


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def event(text: str, tokens: list[int], sources=None) -> StreamEvent:
    """Makes an event of one cycle; all its tokens but the last one are drafted."""
    accepted = tuple(range(1, len(tokens)))
    parents = tuple(range(-1, len(tokens) - 1))  # a chain, or only the root if nothing is drafted
    cycle = CycleTrace((0,) * len(parents), parents, accepted, tokens[-1], sources or ())
    logprobs = [TokenLogprob(token, -float(token), ((token, -float(token)),)) for token in tokens]
    return StreamEvent(text, tokens, len(accepted), logprobs=logprobs, trace=[cycle])


def test_tokens_are_told_with_their_text():
    attribution = TokenAttribution(TOKENIZER, ids("x"), "eagle")
    delta = attribution.add(event("ab", ids("ab")))
    assert delta.tokens == [("a", "eagle"), ("b", "bonus")] and [offset for offset, _ in delta.logprobs] == [0, 1]
    assert delta.cycles == [{"nodes": 2, "depth": 1, "accepted": 1}]
    assert attribution.add(event("c", ids("c"))).tokens == [("c", "root")]


def test_what_is_held_back_is_told_later_with_its_own_proposer():
    attribution = TokenAttribution(TOKENIZER, ids("x"), "eagle")
    first = attribution.add(event("a", ids("abc"), sources=(("suffix", "eagle"), ("suffix",))))
    assert first.tokens == [("a", "suffix+eagle")] and len(first.logprobs) == 1
    second = attribution.add(event("bcd", ids("d")))
    assert second.tokens == [("b", "suffix"), ("c", "bonus"), ("d", "root")]
    assert [offset for offset, _ in second.logprobs] == [1, 2, 3]


def test_a_character_of_several_tokens_belongs_to_the_one_that_completes_it():
    attribution = TokenAttribution(TOKENIZER, ids("x"), "eagle")
    euro = ids("\u20ac")
    assert len(euro) == 3
    first = attribution.add(event("", euro[:2]))
    assert first.tokens == [] and first.logprobs == []
    second = attribution.add(event("\u20acz", [euro[2], *ids("z")]))
    assert second.tokens == [("\u20ac", "eagle"), ("z", "bonus")]
    assert [offset for offset, _ in second.logprobs] == [0, 0, 0, 1]


def test_a_character_that_stays_incomplete_is_told_at_the_end():
    attribution = TokenAttribution(TOKENIZER, ids("x"), "eagle")
    attribution.add(event("a", [*ids("a"), *ids("\u20ac")[:1]]))
    last = attribution.add(StreamEvent("\ufffd", [], 0, logprobs=[], trace=[]))
    assert last.tokens == [("\ufffd", "bonus")] and len(last.logprobs) == 1


def test_nothing_behind_a_stop_string_is_told():
    attribution = TokenAttribution(TOKENIZER, ids("x"), "eagle")
    delta = attribution.add(event("ab", ids("abSTOP")))
    assert [text for text, _ in delta.tokens] == ["a", "b"] and len(delta.logprobs) == 2


def test_the_token_that_ends_a_text_has_no_text():
    attribution = TokenAttribution(TOKENIZER, ids("x"), "eagle")
    delta = attribution.add(event("a", [*ids("a"), TOKENIZER.eos_token_ids[0]]))
    assert delta.tokens == [("a", "eagle")] and len(delta.logprobs) == 1


def test_proposers_of_a_cut_cycle():
    cut = CycleTrace((1, 2, 3), (-1, 0, 1), (1,), None)
    assert proposers_of(cut, "eagle") == ["eagle"]
    assert proposers_of(dataclasses.replace(cut, sources=((),)), "suffix") == ["suffix"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stop", [(), ("a", "\ufffd!", "zz")])
@pytest.mark.parametrize("skips", [True, False])
def test_the_pieces_of_a_real_stream_are_its_text(seed, stop, skips):
    engine = Engine(chat_model(), drafter="prompt_lookup,adaptive=false")
    params = SamplingParams(
        max_new_tokens=120,
        temperature=0.7,
        top_k=12,
        seed=seed,
        stop=stop,
        logprobs=1,
        trace=True,
        ignore_eos=True,
        skip_special_tokens=skips,
        logit_bias=dict.fromkeys(range(3), 4.0),
    )
    prompt, ends = ids("abcabcabc"), chat_model().eos_token_ids
    attribution = TokenAttribution(TOKENIZER, prompt, "prompt_lookup", skips, ends)
    text, entries, told = "", [], []
    for one in engine.stream(prompt, params):
        delta = attribution.add(one)
        assert "".join(piece for piece, _ in delta.tokens) == delta.text == one.text
        text, entries, told = text + delta.text, entries + delta.logprobs, told + delta.tokens
    assert text == plain_engine().generate(prompt, params).text
    assert stop or ({*ends} & {*one.output.token_ids} and skips != ("<s>" in text) and "</s>" not in text)
    assert [own for _, own in entries] == one.output.logprobs[: len(entries)]
    assert [offset for offset, _ in entries] == sorted(offset for offset, _ in entries)
    assert {by for _, by in told} <= {"prompt_lookup", "bonus", "root"}


def test_impossible_tokens_have_a_number_that_json_knows():
    entries = [(0, TokenLogprob(ids("a")[0], float("-inf"), ((ids("b")[0], 0.0),)))]
    assert chat_logprobs(entries, TOKENIZER, 1)["content"][0]["logprob"] == -9999.0
    found = completion_logprobs(entries, TOKENIZER, 1)
    assert found["top_logprobs"] == [{"b": 0.0, "a": -9999.0}] and found["token_logprobs"] == [-9999.0]
