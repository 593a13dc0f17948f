"""Adapters in engines: who shares a batch, a page, a memory or a target with a request never shows in its text."""

import asyncio
import dataclasses

import pytest

from specengine import AsyncEngine, Engine, SamplingParams, generate
from specengine.engine.core import EngineCore
from tests.adapters.files import tiny_adapters, write_adapter
from tests.engine.prefixes import SPECS, SYSTEM, whole
from tests.engines import tiny_engine, tiny_model

GREEDY = SamplingParams(max_new_tokens=16)
SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.8, seed=5)
CHOICES = ("a", None, "b", "c", "a")
PROMPTS = [[3 + i, 9, 27, 81, 3 + i, 9, 27, 40 + i] for i in range(len(CHOICES))]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return tiny_adapters(tmp_path_factory.mktemp("adapters"))


def chosen(params, name):
    return dataclasses.replace(params, adapter=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_mixed_batch_has_the_bits_of_single_runs(adapters, dtype):
    engine = Engine(tiny_model(dtype=dtype), drafter="none", adapters=adapters)
    params = [chosen(dataclasses.replace(SAMPLED, logprobs=3), name) for name in CHOICES]
    together = engine.generate(PROMPTS, params)
    bare = Engine(tiny_model(dtype=dtype), drafter="none").generate(PROMPTS, dataclasses.replace(SAMPLED, logprobs=3))
    for prompt, own, output, without in zip(PROMPTS, params, together, bare, strict=True):
        alone = Engine(tiny_model(dtype=dtype), drafter="none", adapters=adapters).generate(prompt, own)
        assert output.token_ids == alone.token_ids and output.logprobs == alone.logprobs
        assert (output.logprobs == without.logprobs) == (own.adapter is None)


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", SPECS)
def test_every_drafter_gives_the_text_of_plain_decoding_with_the_same_adapter(make, adapters, name):
    plain = tiny_engine("none", adapters=adapters)
    engine = make(name, adapters=adapters)
    for params in (GREEDY, SAMPLED):
        own = [chosen(params, adapter) for adapter in CHOICES]
        expected = [output.token_ids for output in plain.generate(PROMPTS, own)]
        assert [output.token_ids for output in engine.generate(PROMPTS, own)] == expected
        assert (
            engine.generate(PROMPTS[2], own[2]).token_ids == expected[2]
        )  # what it has learned by now changes nothing
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


def answers(engine, prompt=SYSTEM):
    """The texts of one prompt with no adapter and each, and their prefix hits."""
    outputs = [engine.generate([*prompt, 7], chosen(GREEDY, name)) for name in (None, "a", "b", "a", None)]
    return [output.token_ids for output in outputs], [output.stats.prefix_hit_tokens for output in outputs]


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", SPECS)
def test_pages_of_one_adapter_are_never_found_by_another(make, adapters, name):
    cold, _ = answers(make(name, adapters=adapters, prefix_cache_mib=0))
    warm, hits = answers(make(name, adapters=adapters))
    assert warm == cold
    assert [bool(hit) for hit in hits] == [False, False, False, True, True] and hits[3] == whole(len(SYSTEM))


def test_without_their_own_keys_pages_would_be_found_by_others(adapters, monkeypatch):
    cold, _ = answers(tiny_engine("none", adapters=adapters, prefix_cache_mib=0))
    monkeypatch.setattr(EngineCore, "sharing_of", lambda core, adapter: core.sharing)
    warm, hits = answers(tiny_engine("none", adapters=adapters))
    assert hits[1] and warm[1] != cold[1]


def test_earlier_answers_are_remembered_by_adapter(adapters):
    engine = tiny_engine("suffix,remember=1000,adaptive=false", adapters=adapters)
    engine.generate(PROMPTS[0], chosen(GREEDY, "a"))
    a, b = (engine.adapters.find(name) for name in "ab")
    lengths = [sum(map(len, engine.drafter.earlier(adapter).automata())) for adapter in (a, b, None)]
    assert lengths[0] >= 16 and lengths[1:] == [0, 0]


@pytest.mark.parametrize("spec", ["lookahead,warm=true", "ouroboros:self,layers=1,window=3,ngram=3,length=3"])
def test_phrases_are_pooled_by_adapter(adapters, spec):
    engine = tiny_engine(f"{spec},adaptive=false", adapters=adapters)
    engine.generate(PROMPTS, chosen(GREEDY, "a"))
    assert len(engine.drafter.pool) == 0  # of requests without adapter
    engine.generate(PROMPTS, GREEDY)
    assert len(engine.drafter.pool) > 0


def test_engines_of_one_target_keep_their_adapters_apart(tmp_path, adapters):
    model, other = tiny_model(), write_adapter(tmp_path, tiny_model().config, seed=9)
    first, second = Engine(model, adapters=adapters), Engine(model, adapters={"b": other, "a": adapters["b"]})
    expected = [
        tiny_engine("none", adapters=each).generate(PROMPTS[0], chosen(GREEDY, "a")).token_ids
        for each in (adapters, {"a": adapters["b"]})
    ]
    for _ in range(2):
        found = [engine.generate(PROMPTS[0], chosen(GREEDY, "a")).token_ids for engine in (first, second)]
        assert found == expected and found[0] != found[1]
    bare = Engine(model, drafter="none").generate(PROMPTS[0], GREEDY).token_ids
    assert first.generate(PROMPTS[0], GREEDY).token_ids == second.generate(PROMPTS[0], GREEDY).token_ids == bare


def test_loaded_adapters_serve_several_engines(adapters):
    first = tiny_engine("none", adapters=adapters)
    second = tiny_engine(adapters=first.adapters)
    assert second.adapters is first.adapters and second.adapters.names == ("a", "b", "c")
    params = chosen(SAMPLED, "b")
    assert first.generate(PROMPTS[0], params).token_ids == second.generate(PROMPTS[0], params).token_ids


def test_the_async_engine_takes_adapters(adapters):
    async def run():
        async with AsyncEngine(tiny_engine(adapters=adapters)) as engine:
            params = [chosen(SAMPLED, name) for name in CHOICES]
            outputs = await engine.generate(PROMPTS, params)
            with pytest.raises(ValueError, match=r"^adapter: this engine has a, b, c, got 'd'"):
                await engine.generate(PROMPTS[0], chosen(SAMPLED, "d"))
            return [output.token_ids for output in outputs]

    plain = tiny_engine("none", adapters=adapters).generate(PROMPTS, [chosen(SAMPLED, name) for name in CHOICES])
    assert asyncio.run(run()) == [output.token_ids for output in plain]


def test_an_unknown_adapter_is_refused_before_anything_runs(adapters):
    engine = tiny_engine("none", adapters=adapters)
    with pytest.raises(ValueError, match=r"^adapter: this engine has a, b, c, got 'x'"):
        engine.generate(PROMPTS, [GREEDY, GREEDY, GREEDY, GREEDY, chosen(GREEDY, "x")])
    with pytest.raises(ValueError, match=r"^adapter: this engine has none, got 'a'"):
        tiny_engine("none").generate(PROMPTS[0], chosen(GREEDY, "a"))
    for name in ("", 3, ["a"]):
        with pytest.raises(ValueError, match=r"^adapter: expected the name of an adapter or None"):
            SamplingParams(adapter=name)
    for folders in ({}, ["a"], {"": adapters["a"]}, {"a": 3}, {3: adapters["a"]}):
        with pytest.raises(ValueError, match=r"^adapters: "):
            tiny_engine("none", adapters=folders)


def test_loaded_adapters_of_another_model_are_refused(tmp_path, adapters):
    loaded = tiny_engine("none", adapters=adapters).adapters
    with pytest.raises(ValueError, match=r"^adapters: they were loaded for a model of other sizes"):
        Engine("random:tiny-qwen3", drafter="none", adapters=loaded)


@pytest.mark.full
def test_a_target_under_tensor_parallel_has_no_adapters(adapters):
    with pytest.raises(ValueError, match=r"^adapters: a target under tensor_parallel=2 cannot have any"):
        Engine("random:tiny-llama", drafter="none", tensor_parallel=2, adapters=adapters)


def test_generate_takes_adapters_and_keeps_the_engine_of_each_set(adapters):
    def said(folders, name):
        options = {"model": "random:tiny-llama", "drafter": "none", "dtype": "float32", "max_new_tokens": 8}
        return generate(PROMPTS[0], adapters=folders, adapter=name, **options).token_ids

    texts = [said(None, None), said(adapters, "a"), said({"a": adapters["b"]}, "a"), said(adapters, None)]
    assert texts[0] == texts[3] and len({tuple(text) for text in texts}) == 3
    assert said(adapters, "a") == texts[1]
    with pytest.raises(ValueError, match=r"^adapters: expected a mapping"):
        said("a", None)
