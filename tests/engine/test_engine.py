import dataclasses
import threading
import time
from contextlib import suppress

import pytest
import torch

from specengine import _C, Engine, SamplingParams, generate
from specengine.draft_policy.cost_model import CycleCosts
from specengine.drafters.none import NoneDrafter
from specengine.drafters.prompt_lookup.drafter import Config, PromptLookup
from specengine.engine.prompts import encode_prompt
from specengine.ops import native, reference
from specengine.tensor_parallel.loading import load_model, resolve_device
from specengine.tokenizer import Tokenizer
from tests.drafters.steady import steady
from tests.engines import GREEDY, SAMPLED, SHAPED, ids, oracle_engine, tiny_engine, tiny_model
from tests.tokenizer.vocabularies import gguf_metadata

PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 90)), [11, 12, 11, 12, 11, 12, 11], [200] * 9]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SHAPED], ids=["greedy", "sampled", "shaped"])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_speculative_output_is_the_plain_output_in_any_batch(params, batch):
    plain = ids(tiny_engine("none", max_batch_size=1).generate(PROMPTS, params))
    speculative = tiny_engine("prompt_lookup,nodes=12,adaptive=false", max_batch_size=batch).generate(PROMPTS, params)
    assert ids(speculative) == plain


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SHAPED], ids=["greedy", "sampled", "shaped"])
@pytest.mark.parametrize("seed", range(4))
def test_accepting_much_of_many_trees_changes_nothing(params, seed):
    engine = oracle_engine(PROMPTS, params, seed=seed, nodes=(4, 24, 64, 256)[seed], max_batch_size=3)
    plain = tiny_engine("none").generate(PROMPTS, params)
    speculative = engine.generate(PROMPTS, params)
    assert ids(speculative) == ids(plain)
    assert min(output.stats.tau for output in speculative) > 1.5


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
def test_trees_chosen_by_cost_change_nothing(params, batch):
    costs = CycleCosts({1: 1.0, 4: 1.1, 16: 2.0})
    drafter = steady(PromptLookup(Config(), None, tiny_model().target, costs))
    traced, engine = dataclasses.replace(params, trace=True), tiny_engine(drafter, max_batch_size=batch)
    plain = tiny_engine("none").generate(PROMPTS, params)
    for _ in range(2):  # the second time with what was learned
        speculative = engine.generate(PROMPTS, traced)
        assert ids(speculative) == ids(plain)
        assert len({len(cycle.tokens) for output in speculative for cycle in output.trace}) > 2


def test_bfloat16_weights_are_lossless_too():
    model = tiny_model(dtype="bfloat16")
    plain, speculative = (
        Engine(model, drafter=d).generate(PROMPTS, SAMPLED) for d in ("none", "prompt_lookup,adaptive=false")
    )
    assert ids(plain) == ids(speculative)


@pytest.mark.parametrize("name", ["tiny-llama3", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def test_every_family_is_lossless(name):
    model = tiny_model(f"random:{name}")
    drafters = ("none", "prompt_lookup,nodes=20,adaptive=false")
    plain, speculative = (Engine(model, drafter=d).generate(PROMPTS, GREEDY) for d in drafters)
    assert ids(plain) == ids(speculative)


def test_logits_of_tree_nodes_have_the_bits_of_plain_decoding():
    params = dataclasses.replace(GREEDY, logprobs=3)
    traced = oracle_engine(PROMPTS, params).generate(PROMPTS, params)
    plain = tiny_engine("none").generate(PROMPTS, params)
    for a, b in zip(traced, plain, strict=True):
        assert a.stats.tau > 1.5
        assert a.logprobs == b.logprobs  # float64 of the logits: equal only when every bit of a row is


def test_one_prompt_gives_one_output_and_a_list_gives_a_list_in_order():
    engine = tiny_engine()
    single = engine.generate(PROMPTS[0], GREEDY)
    several = engine.generate([PROMPTS[1], PROMPTS[0]], GREEDY)
    assert single.prompt_token_ids == PROMPTS[0]
    assert [output.prompt_token_ids for output in several] == [PROMPTS[1], PROMPTS[0]]
    assert several[1].token_ids == single.token_ids
    assert engine.generate([], GREEDY) == []


def test_params_may_differ_per_prompt():
    engine = tiny_engine()
    mixed = engine.generate(PROMPTS[:3], [GREEDY, SAMPLED, SHAPED])
    alone = [
        engine.generate(prompt, params) for prompt, params in zip(PROMPTS, [GREEDY, SAMPLED, SHAPED], strict=False)
    ]
    assert ids(mixed) == ids(alone)


def test_n_samples_are_those_of_consecutive_seeds():
    engine = tiny_engine()
    samples = engine.generate(PROMPTS[0], dataclasses.replace(SAMPLED, n=3))
    alone = [engine.generate(PROMPTS[0], dataclasses.replace(SAMPLED, seed=SAMPLED.seed + i)) for i in range(3)]
    assert ids(samples) == ids(alone)
    assert len({tuple(output.token_ids) for output in samples}) > 1
    nested = engine.generate(PROMPTS[:2], dataclasses.replace(SAMPLED, n=2))
    assert [len(group) for group in nested] == [2, 2]


def test_the_seed_fixes_the_text_and_another_seed_changes_it():
    engine = tiny_engine()
    first, again = (engine.generate(PROMPTS[0], SAMPLED).token_ids for _ in range(2))
    other = engine.generate(PROMPTS[0], dataclasses.replace(SAMPLED, seed=12)).token_ids
    assert first == again != other


@pytest.mark.parametrize("seed", range(6))
def test_stops_at_eos_inside_an_accepted_run(seed):
    prompt, traced = PROMPTS[0], dataclasses.replace(GREEDY, trace=True)
    free = tiny_engine("none").generate(prompt, GREEDY).token_ids
    end = next(i for i in range(6 + seed, len(free)) if free[i] not in free[:i])
    engine = oracle_engine([prompt], GREEDY, seed=seed, nodes=64)
    engine.model = dataclasses.replace(engine.model, eos_token_ids=frozenset({free[end]}))
    output = engine.generate(prompt, traced)
    assert output.token_ids == free[: end + 1] and output.finish_reason == "stop"
    assert output.stats.cycles < len(output.token_ids)
    assert sum(len(c.accepted) + (c.bonus is not None) for c in output.trace) == len(output.token_ids)
    ignoring = engine.generate(prompt, dataclasses.replace(GREEDY, ignore_eos=True))
    assert ignoring.token_ids == free and ignoring.finish_reason == "length"
    stopped = engine.generate(prompt, dataclasses.replace(traced, ignore_eos=True, stop_token_ids=[free[end - 2]]))
    assert stopped.token_ids == free[: free.index(free[end - 2]) + 1] and stopped.finish_reason == "stop"


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_new_tokens_is_respected_inside_an_accepted_run(limit):
    engine = oracle_engine([PROMPTS[4]], GREEDY, nodes=64)
    full = tiny_engine("none").generate(PROMPTS[4], GREEDY).token_ids
    output = engine.generate(PROMPTS[4], dataclasses.replace(GREEDY, max_new_tokens=limit))
    assert output.token_ids == full[:limit] and output.finish_reason == "length"


def test_trace_shows_trees_whose_accepted_paths_are_the_output():
    output = oracle_engine([PROMPTS[3]], GREEDY).generate(PROMPTS[3], dataclasses.replace(GREEDY, trace=True))
    tokens, root = [], PROMPTS[3][-1]
    for cycle in output.trace:
        assert cycle.tokens[0] == root and cycle.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(cycle.parents) if node)
        for parent, node in zip((0, *cycle.accepted), cycle.accepted, strict=False):
            assert cycle.parents[node] == parent
        tokens += [cycle.tokens[node] for node in cycle.accepted]
        tokens += [] if cycle.bonus is None else [cycle.bonus]
        root = tokens[-1]
    assert tokens == output.token_ids
    assert len(output.trace) == output.stats.cycles
    assert tiny_engine().generate(PROMPTS[3], GREEDY).trace is None


class SlowObserver(NoneDrafter):
    """Takes its time to observe prompts and cycles."""

    reads_hidden_states = True

    def observe_prompt(self, request, start, hidden_states):
        time.sleep(0.05)

    def observe(self, draft, committed, hidden_states):
        time.sleep(0.01)


def test_what_a_drafter_learns_counts_as_drafting_and_as_prefill():
    model = tiny_model()
    drafter = SlowObserver(None, None, model.target)
    stats = Engine(model, drafter=drafter).generate(PROMPTS[0], GREEDY).stats
    assert stats.cycles > 1 and stats.seconds_by_phase["draft"] >= 0.01 * stats.cycles
    assert stats.prefill_seconds >= 0.05
    assert sum(stats.seconds_by_phase.values()) == pytest.approx(stats.decode_seconds)


def test_stats_add_up():
    output = oracle_engine([PROMPTS[3]], GREEDY).generate(PROMPTS[3], GREEDY)
    stats = output.stats
    assert stats.tau == pytest.approx(len(output.token_ids) / stats.cycles)
    assert sum(stats.seconds_by_phase.values()) == pytest.approx(stats.decode_seconds)
    assert set(stats.seconds_by_phase) == {"draft", "verify", "accept", "compact", "host"}
    assert all(0 <= rate <= 1 for rate in stats.acceptance_by_depth) and stats.acceptance_by_depth
    assert tiny_engine("none").generate(PROMPTS[3], GREEDY).stats.tau == 1
    times, counts = zip(*stats.deliveries, strict=True)
    assert len(counts) == stats.cycles and sum(counts) == len(output.token_ids) and max(counts) > 1
    assert stats.prefill_seconds < times[0] and list(times) == sorted(times)


def test_stream_delivers_what_generate_returns():
    engine = oracle_engine([PROMPTS[3]], GREEDY)
    events = list(engine.stream(PROMPTS[3], GREEDY))
    output = engine.generate(PROMPTS[3], GREEDY)
    assert [token for event in events for token in event.token_ids] == output.token_ids
    assert events[-1].output.token_ids == output.token_ids
    assert all(event.output is None for event in events[:-1])
    assert sum(event.accepted + 1 for event in events) in (len(output.token_ids), len(output.token_ids) + 1)
    assert len(events) < len(output.token_ids)


def test_an_abandoned_stream_gives_its_pages_back():
    engine = tiny_engine()
    stream = engine.stream(PROMPTS[2], GREEDY)
    next(stream)
    assert engine.cache.pages_in_use > 0
    stream.close()
    assert engine.cache.pages_in_use == 0


def test_threads_may_share_an_engine():
    engine = tiny_engine()
    expected = ids(engine.generate(PROMPTS, SAMPLED))
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = engine.generate(PROMPTS[i], SAMPLED).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(len(PROMPTS))] == expected


def test_threads_wait_for_pages_that_another_one_was_given(monkeypatch):
    engine, params = tiny_engine("none"), SamplingParams(max_new_tokens=8)
    cache = engine.model.target.new_cache(1)  # room for one of them at a time
    engine.core.cache, engine.core.cycle = cache, dataclasses.replace(engine.core.cycle, cache=cache)
    has_room, both, said = cache.has_room, threading.Barrier(2), {}

    def found(slots):
        room = has_room(slots)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for the other one to find the same room, before it is taken
        return room

    def work(i):
        said[i] = engine.generate(PROMPTS[i], params).token_ids

    monkeypatch.setattr(cache, "has_room", found)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = ids(tiny_engine("none").generate(PROMPTS[:2], params))
    assert [said.get(i) for i in range(2)] == expected


def test_generation_ends_with_the_context():
    config = tiny_model().config
    prompt = [3 + i % 50 for i in range(config.max_position - 5)]
    output = tiny_engine().generate(prompt, SamplingParams(max_new_tokens=100))
    assert len(output.token_ids) == 5 and output.finish_reason == "length"
    assert output.token_ids == tiny_engine("none").generate(prompt, SamplingParams(max_new_tokens=100)).token_ids


def test_a_long_prompt_is_prefilled_in_chunks_without_changing_a_bit():
    prompt = [3 + (i * i) % 200 for i in range(400)]
    whole = tiny_engine("none").generate(prompt, dataclasses.replace(GREEDY, logprobs=1))
    model = load_model("random:tiny-llama", device="cpu", ops=dataclasses.replace(native, prefill_rows=37))
    engine = Engine(dataclasses.replace(model, eos_token_ids=frozenset()), drafter="none")
    assert engine.generate(prompt, dataclasses.replace(GREEDY, logprobs=1)).logprobs == whole.logprobs


def test_logprobs_are_those_of_the_unprocessed_distribution():
    engine = tiny_engine()
    plain = engine.generate(PROMPTS[0], dataclasses.replace(GREEDY, logprobs=4))
    assert [entry.token_id for entry in plain.logprobs] == plain.token_ids
    for entry in plain.logprobs:
        assert len(entry.top) == 4
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]  # greedy: the emitted token is the most likely
    sampled = engine.generate(PROMPTS[0], dataclasses.replace(SAMPLED, logprobs=2))
    assert all(entry.logprob <= entry.top[0][1] for entry in sampled.logprobs)
    assert engine.generate(PROMPTS[0], GREEDY).logprobs is None


def test_penalties_and_bias_change_the_text_in_their_direction():
    engine = tiny_engine()
    plain = engine.generate(PROMPTS[4], GREEDY).token_ids
    penalised = engine.generate(PROMPTS[4], dataclasses.replace(GREEDY, frequency_penalty=5.0)).token_ids
    assert len(set(penalised)) > len(set(plain))
    banned = plain[0]
    assert banned not in engine.generate(PROMPTS[4], dataclasses.replace(GREEDY, logit_bias={banned: -1e5})).token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "prompt: is empty"),
        ([[3, 260_000]], "token id 260000"),
        ([[-1]], "token id -1"),
        ([[1.5, 2.5]], "prompt: expected a string"),
        ("text", "no tokenizer"),
        ([{"role": "user", "content": "hi"}], "no tokenizer"),
        (7, "prompts: expected a string"),
        (None, "prompts: expected a string"),
        ([[True, False]], "prompt: expected a string"),
    ],
)
def test_bad_prompts_are_refused_by_name(prompt, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine().generate(prompt, GREEDY)


def test_a_token_beyond_the_rows_of_the_model_is_refused_by_its_text():
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    config = dataclasses.replace(tiny_model().config, vocab_size=260)
    assert encode_prompt("the", tokenizer, config) == [257]
    with pytest.raises(ValueError, match=r"prompt: token id 260 \('<tool>'\) is not in 0 to 259"):
        encode_prompt("the<tool>", tokenizer, config)


def test_a_prompt_longer_than_the_context_is_refused():
    length = tiny_model().config.max_position
    with pytest.raises(ValueError, match=f"prompt: has {length} tokens; the prompt is too long, because"):
        tiny_engine().generate([3] * length, GREEDY)


def test_parameters_the_model_cannot_honour_are_refused():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="stop: this model has no tokenizer"):
        engine.generate([3], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="logit_bias: token id 999999"):
        engine.generate([3], SamplingParams(logit_bias={999_999: 1.0}))
    with pytest.raises(ValueError, match="params: expected one SamplingParams or 2"):
        engine.generate([[3], [4]], [GREEDY])
    with pytest.raises(ValueError, match="n: stream"):
        engine.stream([3], SamplingParams(n=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "nonsense"}, "drafter: expected auto or one of"),
        ({"drafter": "prompt_lookup,nodes=0"}, "nodes: expected an integer from 2 to 256"),
        ({"drafter": "prompt_lookup,size=3"}, "has no option 'size'"),
        ({"drafter": "prompt_lookup:somewhere"}, "takes no path"),
        ({"drafter": "none,"}, "expected option=value"),
        ({"rule": "nonsense"}, "rule: expected one of match, rejection"),
        ({"rule": "cascade:opt"}, "rule: cascade needs children sampled .* drafters that do: dflash, .*draft_model"),
        ({"device": "tpu"}, "device: expected auto, cpu or cuda"),
        ({"dtype": "float64"}, "dtype: expected auto"),
        ({"max_batch_size": 0}, "max_batch_size"),
    ],
)
def test_bad_engine_arguments_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Engine("random:tiny-llama", **options)


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device: cuda was asked for"):
        Engine("random:tiny-llama", device="cuda")


def test_a_core_without_cuda_says_how_to_build_it_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_C, "cuda_architectures", "")
    with pytest.raises(ValueError, match=r"device: specengine was built without CUDA.*SPECENGINE_CUDA=1"):
        Engine("random:tiny-llama", device="cuda")
    with pytest.warns(UserWarning, match=r"auto takes the CPU although PyTorch sees a GPU: .*SPECENGINE_CUDA=1"):
        assert resolve_device("auto").type == "cpu"
    monkeypatch.setattr(_C, "cuda_architectures", "90a-real")
    assert resolve_device("auto").type == "cuda"


def test_nan_logits_are_an_error_and_the_engine_stays_usable():
    engine = tiny_engine()
    expected = engine.generate(PROMPTS[0], GREEDY).token_ids
    norm = engine.model.target.final_norm
    saved = norm.clone()
    norm[0] = float("nan")
    try:
        with pytest.raises(ValueError, match=r"logits: row .* NaN"):
            engine.generate(PROMPTS[0], GREEDY)
    finally:
        norm.copy_(saved)
    assert engine.generate(PROMPTS[0], GREEDY).token_ids == expected


def test_repeated_calls_of_generate_reuse_the_engine():
    from specengine import api

    first = generate([3, 4, 5], model="random:tiny-qwen3", max_new_tokens=4)
    engines = {key: engine for key, engine in api._engines.items() if key[0] == "random:tiny-qwen3"}
    again = generate([3, 4, 5], model="random:tiny-qwen3", max_new_tokens=4, drafter="none")
    assert first.token_ids == again.token_ids
    assert all(api._engines[key] is engine for key, engine in engines.items())
    models = {id(engine.model) for key, engine in api._engines.items() if key[0] == "random:tiny-qwen3"}
    assert len(models) == 1


def test_the_reference_ops_agree_with_the_native_ones():
    model = load_model("random:tiny-llama", device="cpu", ops=reference)
    engine = Engine(dataclasses.replace(model, eos_token_ids=frozenset()), drafter="prompt_lookup,adaptive=false")
    native, other = (e.generate(PROMPTS, dataclasses.replace(GREEDY, logprobs=1)) for e in (tiny_engine(), engine))
    for a, b in zip(native, other, strict=True):
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-3)
            if x.token_id != y.token_id:
                break
