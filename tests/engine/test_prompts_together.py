"""Prompts that are read in one pass: how many passes there are, and that no prompt's bits depend on the others."""

import dataclasses
from itertools import pairwise

import pytest

from specengine import Engine, SamplingParams
from specengine.engine.prefill import Prefill
from specengine.engine.scheduler import Scheduler
from specengine.models.hidden_states import HiddenStates
from specengine.ops import native
from tests.adapters.files import tiny_adapters
from tests.engine.gated import settled
from tests.engine.prefixes import said
from tests.engines import ids, tiny_engine, tiny_model

PARAMS = SamplingParams(max_new_tokens=6, temperature=0.8, seed=3)
ROWS = native.prefill_rows  # 256


def prompt(first, tokens):
    """A prompt that shares no page with one of another first token."""
    return [first, *(3 + (first + 5 * i * i + i) % 240 for i in range(tokens - 1))]


MIXED = [prompt(5, 20), [7], prompt(6, 300), prompt(7, 31), prompt(8, 257), prompt(9, 2), prompt(10, 90)]


@pytest.fixture
def passes(monkeypatch):
    """Watches an engine: the rows that each prompt has in each pass over prompts."""
    reading, read = [], Prefill.run

    def run(prefill):
        reading.append(prefill)
        try:
            return read(prefill)
        finally:
            reading.pop()

    monkeypatch.setattr(Prefill, "run", run)

    def watch(engine):
        found, target = [], engine.core.target
        original = target.hidden_states

        def hidden_states(tree, *rest):
            if reading:  # not in a cycle
                found.append([end - start for start, end in pairwise(tree.starts)])
            return original(tree, *rest)

        monkeypatch.setattr(target, "hidden_states", hidden_states)
        return found

    return watch


def test_short_prompts_are_read_in_as_few_passes_as_they_fill(passes):
    engine = tiny_engine("none", max_batch_size=64)
    found = passes(engine)
    engine.generate([prompt(3 + i, 21) for i in range(64)], PARAMS)
    assert found == [12 * [20]] * 5 + [4 * [20]] and ROWS == 256


def test_prompts_that_do_not_fit_beside_each_other_have_passes_of_their_own(passes):
    """The control of the test before."""
    engine = tiny_engine("none", max_batch_size=64)
    found = passes(engine)
    engine.generate([prompt(3 + i, 130) for i in range(6)], PARAMS)
    assert found == 6 * [[129]]


def test_a_prompt_has_the_pieces_that_it_has_alone(passes):
    engine = tiny_engine("none", max_batch_size=8)
    found = passes(engine)
    engine.generate(MIXED, PARAMS)
    assert found == [[19, 30], [256], [256], [1, 43, 89]]


def test_a_batch_that_is_full_takes_no_further_prompt(passes):
    engine = tiny_engine("none", max_batch_size=2)
    found = passes(engine)
    engine.generate([prompt(3 + i, 21) for i in range(5)], PARAMS)
    assert found == [[20, 20], [20, 20], [20]]


def test_a_prompt_waits_for_pages_that_the_one_before_it_fills(passes):
    engine = tiny_engine("none", max_batch_size=8)
    found, long, other = passes(engine), prompt(3, 140), prompt(4, 30)
    outputs = engine.generate([long, [*long[:-1], 9], other, long], PARAMS)
    assert found == [[29, 139], [11, 11]]
    assert [output.stats.prefix_hit_tokens for output in outputs] == [0, 128, 0, 128]
    cold = tiny_engine("none", max_batch_size=8, prefix_cache_mib=0)
    found = passes(cold)
    assert ids(cold.generate([long, [*long[:-1], 9], other, long], PARAMS)) == ids(outputs)
    assert found == [[139], [29, 139], [139]]  # without shared pages none waits for another


def test_prompts_behind_the_same_cached_prefix_are_read_together(passes):
    engine, system = tiny_engine("none", max_batch_size=8), prompt(3, 150)
    engine.generate(system, PARAMS)
    found = passes(engine)
    outputs = engine.generate([[*system, 5 + i, 9] for i in range(4)], PARAMS)
    assert found == [4 * [151 - 128]] and [output.stats.prefix_hit_tokens for output in outputs] == 4 * [128]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_prompts_that_are_read_together_have_the_bits_of_single_ones(dtype):
    together = Engine(tiny_model(dtype=dtype), drafter="none", max_batch_size=8)
    alone = Engine(tiny_model(dtype=dtype), drafter="none", max_batch_size=1)
    assert said(together, MIXED, PARAMS) == said(alone, MIXED, PARAMS)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["eagle3", "fasteagle", "glide", "medusa", "mtp", "pard2", "combine"])
def test_a_drafter_reads_each_prompts_own_rows(make, name, passes, monkeypatch):
    engine = make(name, max_batch_size=8)
    found = passes(engine)
    together = said(engine, MIXED, PARAMS)
    assert [1, 43, 89] in found
    monkeypatch.setattr(Prefill, "has_room", property(lambda prefill: not prefill.requests))
    engine = make(name, max_batch_size=8)
    found = passes(engine)
    assert said(engine, MIXED, PARAMS) == together and {*map(len, found)} == {1}


def test_rows_of_another_prompt_are_seen(make, monkeypatch):
    """The control of the test before."""
    split = HiddenStates.split
    prompts = [prompt(5, 20), prompt(6, 20)]
    expected = said(make("eagle3", max_batch_size=2), prompts, PARAMS)
    monkeypatch.setattr(HiddenStates, "split", lambda states, counts: split(states, counts)[::-1])
    found = said(make("eagle3", max_batch_size=2), prompts, PARAMS)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected] and found != expected


def test_each_prompt_is_read_with_its_own_adapter(tmp_path, passes):
    params = [dataclasses.replace(PARAMS, adapter=name, logprobs=2) for name in ("a", None, "b", "c")]
    adapters, prompts = tiny_adapters(tmp_path), 4 * [prompt(5, 20)]
    engine = tiny_engine("none", max_batch_size=4, adapters=adapters)
    found = passes(engine)
    outputs = engine.generate(prompts, params)
    assert found == [4 * [19]] and len({*map(str, ids(outputs))}) > 1
    single = tiny_engine("none", max_batch_size=1, adapters=adapters).generate(prompts, params)
    assert [output.logprobs for output in outputs] == [output.logprobs for output in single]


def test_the_seconds_of_a_pass_are_divided_among_its_prompts():
    prompts = [prompt(5, 101), prompt(6, 51), prompt(7, 51)]
    together = [o.stats.prefill_seconds for o in tiny_engine("none", max_batch_size=8).generate(prompts, PARAMS)]
    assert together[0] == pytest.approx(2 * together[1], rel=0.5) and min(together) > 0


def stepped(engine, prompts, end=lambda scheduler, requests: None, behind=0):
    """Requests whose prompts were read one pass a step; `end` is called behind that step."""
    requests, scheduler = engine.prepare(prompts, PARAMS).requests, Scheduler(engine.core, max_prefill_rows=1)
    scheduler.add(requests)
    steps = 0
    while scheduler.has_unfinished_requests:
        scheduler.step()
        steps += 1
        if steps == behind:
            end(scheduler, requests)
    return requests


@pytest.mark.parametrize("steps, gone", [(1, 0), (2, 0), (3, 2), (4, 2)])
def test_a_request_that_ends_before_its_prompt_is_read_changes_nothing_for_the_others(make, steps, gone):
    """The first step reads the second and the fourth prompt, the second and the third one the first prompt, the fourth
    a piece of the third. The first and the third request wait with their pages for rows in a pass."""
    prompts = [prompt(4, 300), prompt(5, 20), prompt(6, 500), prompt(7, 31), prompt(8, 31)]

    def end(scheduler, requests):
        assert requests[gone].pages and not requests[gone].finish_reason
        assert requests[gone].cached == {(2, 0): 256, (4, 2): 256}.get((steps, gone), 0)
        scheduler.finish([requests[gone]], "cancelled")
        assert not requests[gone].pages

    engine = make("eagle3", max_batch_size=4)
    requests = stepped(engine, prompts, end, steps)
    expected = stepped(make("eagle3", max_batch_size=4), prompts)
    for number, (request, other) in enumerate(zip(requests, expected, strict=True)):
        assert number == gone or (request.output_ids == other.output_ids and len(request.output_ids) == 6)
        assert request.finish_reason == ("cancelled" if number == gone else "length")
    settled(engine)


def test_a_pass_that_fails_ends_the_requests_in_it_and_no_others(monkeypatch):
    engine = tiny_engine("none", max_batch_size=8)
    prompts = [prompt(5, 20), prompt(6, 20), prompt(7, 250), prompt(8, 20)]
    expected = ids(tiny_engine("none").generate(prompts[2:], PARAMS))
    original = engine.core.target.hidden_states

    def hidden_states(tree, *rest):
        if len(tree.tokens) == 2 * 19:
            raise RuntimeError("planted")
        return original(tree, *rest)

    monkeypatch.setattr(engine.core.target, "hidden_states", hidden_states)
    requests, scheduler = engine.prepare(prompts, PARAMS).requests, Scheduler(engine.core)
    scheduler.add(requests)
    with pytest.raises(RuntimeError, match="planted"):
        scheduler.step()
    assert [bool(request.pages) for request in requests] == [False, False, True, False]  # the third one has its pages
    while scheduler.has_unfinished_requests:
        scheduler.step()
    assert [request.finish_reason for request in requests] == ["error", "error", "length", "length"]
    assert [request.output_ids for request in requests[2:]] == expected
    settled(engine)
