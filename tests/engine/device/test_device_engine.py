"""The engine whose cycles run on the device: the CUDA kernels on the simulator, or on a GPU where there is one."""

import asyncio
import copy
import dataclasses
import threading
import time

import pytest
import torch

from specengine import AsyncEngine, SamplingParams
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.drafter import Drafter
from specengine.engine.device.cycle_graphs import buckets_up_to, widths_up_to
from specengine.engine.device.graph_batch import GraphBatch
from specengine.engine.device.memory_budget import DeviceOptions, pages_left
from specengine.rules.base import Wants
from tests.drafters.fasteagle_files import random_fasteagle
from tests.engine.device.prompts import GREEDY, LOOKUP, PROMPTS, SAMPLED, SHAPED, on_the_cpu
from tests.engines import Oracle, ids


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SHAPED], ids=["greedy", "sampled", "shaped"])
@pytest.mark.parametrize("drafter", ["none", LOOKUP])
def test_the_device_says_what_the_cpu_says(device_engine, drafter, params):
    expected = ids(on_the_cpu(params))
    for batch in (1, 3):
        assert ids(device_engine(drafter, max_batch_size=batch).generate(PROMPTS, params)) == expected


def test_much_is_accepted_where_the_text_repeats_itself(device_engine):
    loop = SamplingParams(max_new_tokens=24, logit_bias=dict.fromkeys((8, 9), 50.0), repetition_penalty=1.0)
    (output,) = device_engine().generate([[8, 9] * 6], loop)
    assert output.stats.tau > 2 and max(output.stats.acceptance_by_depth) > 0.5


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_strict_speculation_has_the_bits_of_plain_decoding(device_engine, params):
    traced = dataclasses.replace(params, logprobs=2, trace=True)
    plain, drafted = (
        device_engine(d, max_batch_size=b).generate(PROMPTS, traced) for d, b in (("none", 1), (LOOKUP, 3))
    )
    for a, b in zip(plain, drafted, strict=True):
        assert a.logprobs == b.logprobs
    assert any(len(cycle.tokens) > 1 for output in drafted for cycle in output.trace)


@pytest.mark.full
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def test_every_family_runs_on_the_device(device_engine, name):
    assert ids(device_engine(name=name).generate(PROMPTS, GREEDY)) == ids(on_the_cpu(GREEDY, name))


def test_trees_drafted_on_the_host_are_verified_on_the_device(device_engine):
    plain = on_the_cpu(SAMPLED)
    answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    engine = device_engine(Oracle(answers, 256, nodes=12), max_batch_size=3)
    outputs = engine.generate(PROMPTS, SAMPLED)
    assert ids(outputs) == ids(plain)
    assert min(output.stats.tau for output in outputs) > 1.2


class SlowDrafter(Drafter):
    """Takes its time to draft nothing on the host, and to observe cycles."""

    name, max_nodes = "slow", 1

    def draft(self, requests):
        time.sleep(0.01)
        return Draft(requests, [DraftTree([request.tokens[-1]], [-1]) for request in requests])

    def observe(self, draft, committed, hidden_states):
        time.sleep(0.02)


def test_a_drafter_on_the_host_is_timed_between_cycles(device_engine):
    engine = device_engine(SlowDrafter(None, None, None))
    stats = engine.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_new_tokens=3)).stats
    assert 0.03 * stats.cycles <= stats.seconds_by_phase["draft"] < stats.decode_seconds
    assert sum(stats.seconds_by_phase.values()) == pytest.approx(stats.decode_seconds)
    assert stats.cycles == 3


@pytest.mark.full
@pytest.mark.parametrize("spec", ["length=2", "tree=2x1"])
@pytest.mark.parametrize("wants", [Wants.NOTHING, Wants.PROBABILITIES])
def test_a_draft_model_hands_over_its_distributions(device_engine, monkeypatch, spec, wants):
    short = dataclasses.replace(SAMPLED, max_new_tokens=6)
    expected = ids(on_the_cpu(short)[:3])
    monkeypatch.setattr("specengine.rules.Match.wants", wants)
    engine, seen, draft = (
        device_engine(f"draft-model:self,layers=1,adaptive=false,{spec}", max_batch_size=3),
        [],
        GraphBatch.draft,
    )

    def watched(slots, *rest):
        tree = draft(slots, *rest)
        seen.append(copy.deepcopy(slots.draft_logits))
        return tree

    monkeypatch.setattr(GraphBatch, "draft", watched)
    assert ids(engine.generate(PROMPTS[:3], short)) == expected
    own, shared = engine.drafter.small.cache, engine.cache
    assert own.fixed and own.k.shape[1] == shared.k.shape[1] and own.pages_in_use == shared.pages_in_use == 0
    assert any(logits is not None and logits.rows[0] == 0 for logits in seen) == (wants is Wants.PROBABILITIES)


@pytest.fixture(scope="module")
def cascade(tmp_path_factory):
    """A drafter of few tokens, and parameters under which the target says no others: much is accepted by chance."""
    folder, tensors = random_fasteagle(tmp_path_factory.mktemp("cascade"), vocabulary=12)
    tokens = (torch.arange(12) + tensors["d2t"]).tolist()
    params = SamplingParams(
        max_new_tokens=10, temperature=0.9, seed=11, logit_bias=dict.fromkeys(tokens, 60.0), trace=True
    )
    return f"fasteagle:{folder},adaptive=false", params


@pytest.mark.full
def test_drafters_in_one_tree_draft_between_two_captured_cycles(device_engine, cascade):
    spec, params = cascade
    expected = on_the_cpu(params)
    engine = device_engine(f"combine:suffix+{spec.replace(',', ';')};top_k=3,nodes=8,adaptive=false", max_batch_size=3)
    outputs = engine.generate(PROMPTS, params)
    assert ids(outputs) == ids(expected)
    drafted = [cycle for output in outputs for cycle in output.trace if len(cycle.tokens) > 1]
    assert drafted and sum(output.stats.cycles for output in outputs) < sum(each.stats.cycles for each in expected)
    for output in outputs:
        nodes, accepted = (
            sum(counts) for counts in zip(*((len(c.tokens) - 1, len(c.accepted)) for c in output.trace), strict=True)
        )
        sources = output.stats.sources.values()
        assert max((s.drafted for s in sources), default=0) <= nodes <= sum(s.drafted for s in sources)
        assert max((s.accepted for s in sources), default=0) <= accepted <= sum(s.accepted for s in sources)


@pytest.mark.full
@pytest.mark.parametrize(
    "spec", ["lookahead,window=3,ngram=3,guesses=3", "ouroboros:self,layers=1,window=2,ngram=3,length=3"]
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafters_that_read_choices_learn_between_two_captured_cycles(device_engine, spec, params):
    engine = device_engine(spec + ",warm=true,adaptive=false", max_batch_size=3)
    outputs = engine.generate(PROMPTS, params)
    assert ids(outputs) == ids(on_the_cpu(params, drafter="none"))
    assert len(engine.drafter.pool) > 0
    if params is GREEDY:
        assert sum(output.stats.cycles for output in outputs) < sum(map(len, ids(outputs)))


@pytest.mark.full
@pytest.mark.parametrize("options, batch", [("top_k=5", 3), ("top_k=5,levels=2", 1), ("top_k=1", 2)])
def test_a_cascade_drafts_on_the_device_what_it_drafts_on_the_host(device_engine, cascade, options, batch):
    spec, params = cascade
    expected = on_the_cpu(params, drafter=f"{spec},{options}")
    outputs = device_engine(f"{spec},{options}", max_batch_size=batch).generate(PROMPTS, params)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [sorted(cycle.tokens) for cycle in ours.trace] == [sorted(cycle.tokens) for cycle in theirs.trace]
    assert max(output.stats.tau for output in expected) > 1.05


@pytest.mark.full
def test_a_cascades_pairs_follow_their_sequence_from_batch_to_batch(device_engine, cascade):
    """Streams side by side take the device in turns: what is left to read goes with the request."""
    spec, params = cascade
    alone = on_the_cpu(params, drafter=f"{spec},top_k=3")
    engine = device_engine(f"{spec},top_k=3", max_batch_size=2)
    streams = [engine.stream(prompt, params) for prompt in PROMPTS]
    last = [None] * len(streams)
    while any(stream is not None for stream in streams):
        for i, stream in enumerate(streams):
            event = next(stream, None) if stream is not None else None
            streams[i], last[i] = (stream, event) if event is not None else (None, last[i])
    for event, output in zip(last, alone, strict=True):
        assert event.output.token_ids == output.token_ids
        assert [cycle.accepted for cycle in event.output.trace] == [cycle.accepted for cycle in output.trace]


def test_end_of_text_is_seen_by_the_device_and_stops_the_sequence(device_engine):
    whole = on_the_cpu(GREEDY)
    eos = frozenset({whole[0].token_ids[5]})
    expected = on_the_cpu(GREEDY, eos=eos)
    outputs = device_engine(eos=eos, max_batch_size=2).generate(PROMPTS, GREEDY)
    assert ids(outputs) == ids(expected)
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]
    ignored = dataclasses.replace(GREEDY, ignore_eos=True)
    assert ids(device_engine(eos=eos).generate(PROMPTS, ignored)) == ids(whole)
    stopping = dataclasses.replace(ignored, stop_token_ids=[*eos])  # the host sees it, while the device is ahead
    assert ids(device_engine(eos=eos, max_batch_size=2).generate(PROMPTS, stopping)) == ids(expected)


def test_streams_are_delivered_cycle_by_cycle(device_engine):
    engine = device_engine()
    expected = engine.generate(PROMPTS[0], GREEDY)
    events = list(engine.stream(PROMPTS[0], GREEDY))
    assert [t for event in events for t in event.token_ids] == expected.token_ids
    assert events[-1].output.token_ids == expected.token_ids and len(events) == expected.stats.cycles


@pytest.mark.full
def test_streams_side_by_side_and_abandoned_ones_keep_to_themselves(device_engine):
    engine = device_engine(max_batch_size=2)
    expected = ids(engine.generate(PROMPTS, SAMPLED))
    streams = [engine.stream(prompt, SAMPLED) for prompt in PROMPTS]
    abandoned = engine.stream(PROMPTS[2], GREEDY)
    next(abandoned)
    found = [[] for _ in PROMPTS]
    live = dict(enumerate(streams))
    while live:
        for i, stream in list(live.items()):
            event = next(stream, None)
            if event is None:
                del live[i]
            else:
                found[i] += event.token_ids
        if abandoned:
            abandoned = abandoned.close()
    assert found == expected


@pytest.mark.full
def test_threads_share_an_engine(device_engine):
    engine = device_engine(max_batch_size=2)
    expected, found = ids(engine.generate(PROMPTS, SAMPLED)), {}

    def work(i):
        found[i] = engine.generate(PROMPTS[i], SAMPLED).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(PROMPTS))] == expected


def test_requests_of_a_service_join_and_leave_cycles_that_run_ahead(device_engine):
    engine, params = device_engine(max_batch_size=2), dataclasses.replace(SAMPLED, max_new_tokens=6)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    expected = ids(on_the_cpu(params, prompts=prompts))

    async def main() -> list[list[int]]:
        async with AsyncEngine(engine) as serving:
            tasks = []
            for prompt in prompts:
                gone = serving.stream(prompt[::-1], GREEDY)
                await anext(gone)
                tasks.append(asyncio.create_task(serving.generate(prompt, params)))
                await anext(gone)
                await gone.aclose()
            return ids(await asyncio.gather(*tasks))

    assert asyncio.run(main()) == expected
    assert engine.metrics.snapshot().finished == {"length": 3, "cancelled": 3}
    assert engine.cache.pages_in_use == 0


@pytest.mark.full
def test_pages_are_given_back_and_requests_wait_for_them(device_engine):
    engine = device_engine(max_batch_size=4)
    cache = engine.cache
    held = cache.allocate((cache.k.shape[1] - 3) * 64)  # room for one prompt at a time
    try:
        assert ids(engine.generate(PROMPTS, GREEDY)) == ids(on_the_cpu(GREEDY))
    finally:
        cache.free(held)
    assert cache.pages_in_use == 0


def test_scores_without_a_distribution_are_an_error(device_engine):
    engine = device_engine("none")
    bad = dataclasses.replace(GREEDY, logit_bias={3: 1e6}, temperature=1e-4, repetition_penalty=1e3)
    engine.model.target.final_norm.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"^logits: request 0, position 5 has NaN"):
        engine.generate(PROMPTS[0], bad)
    assert engine.cache.pages_in_use == 0


def test_biases_that_have_no_room_together_wait_and_too_many_are_refused(device_engine, monkeypatch):
    monkeypatch.setattr("specengine.engine.device.buffers.MAX_BIASES", 250)
    engine, prompts = device_engine(max_batch_size=4), PROMPTS[:2] * 2
    params = SamplingParams(max_new_tokens=3, logit_bias=dict.fromkeys(range(100), 9.0))
    assert ids(engine.generate(prompts, params)) == ids(on_the_cpu(params, prompts=prompts))
    counts = engine.metrics.snapshot()
    assert counts.request_cycles == 2 * counts.cycles
    with pytest.raises(ValueError, match=r"^logit_bias: has 251 entries, at most 250 fit"):
        engine.generate(PROMPTS[0], SamplingParams(logit_bias=dict.fromkeys(range(251), 1.0)))


@pytest.mark.full
def test_half_types_give_a_text_of_the_same_kind(device_engine):
    for dtype in ("bfloat16", "float16"):
        plain, drafted = (device_engine(d, dtype=dtype).generate(PROMPTS, GREEDY) for d in ("none", LOOKUP))
        assert ids(plain) == ids(drafted)  # strict


def test_buckets_and_widths_end_with_what_was_asked_for():
    assert buckets_up_to(1) == (1,) and buckets_up_to(16) == (1, 2, 4, 8, 16) and buckets_up_to(5) == (1, 2, 4, 5)
    assert widths_up_to(1) == (1,) and widths_up_to(61) == (1, 2, 4, 8, 16, 32, 61)


def test_memory_is_planned_from_what_is_free_or_refused_with_the_numbers():
    gib = 1 << 30
    assert pages_left(60 * gib, 80 * gib, 0.9, 2 * gib, gib) == 50
    with pytest.raises(ValueError, match=r"^gpu_memory_fraction: 0.3 of 80.0 GiB .* 20.0 GiB are in use .* 5.0 GiB"):
        pages_left(60 * gib, 80 * gib, 0.3, 5 * gib, gib)
    for fraction in (0, 1.5, "all", True):
        with pytest.raises(ValueError, match=r"^gpu_memory_fraction: "):
            DeviceOptions(4, fraction, True)


def test_a_request_that_can_never_fit_is_refused_before_it_runs(device_engine):
    engine = device_engine()
    engine.cache.check_fits(engine.cache.k.shape[1] * 64)
    with pytest.raises(ValueError, match=r"^prompt: .* the cache has \d+"):
        engine.cache.check_fits(engine.cache.k.shape[1] * 64 + 1)
