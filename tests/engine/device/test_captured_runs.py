"""Captured engines at work on a stand-in device: joins, leaves, engines beside each other, and engines that fail."""

import asyncio
import gc
import threading
from contextlib import contextmanager

import pytest

from specengine import AsyncEngine, SamplingParams
from specengine.engine.device import cycle_graphs
from tests.cuda_standin.device import Device
from tests.cuda_standin.install import standing_in
from tests.engine.device.captured import captured_engine, model_on_the_standin
from tests.engine.device.prompts import PROMPTS, SAMPLED, on_the_cpu
from tests.engine.prefixes import SPECS

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
SMALL = "prompt_lookup,nodes=2,adaptive=false"
PARAMS = SamplingParams(max_new_tokens=5)
TEXT = [1] * 5  # of a device that runs nothing


@contextmanager
def running(engine):
    """Another thread generates with an engine until the block ends, and at least once."""
    stopped, said, begun = threading.Event(), [], threading.Event()

    def run() -> None:
        while not (stopped.is_set() and said):
            said.append([output.token_ids for output in engine.generate(PROMPTS[:2], PARAMS)])
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    assert said == [[TEXT, TEXT]] * len(said)


@pytest.mark.full
def test_a_stream_goes_on_behind_timed_phases(device):
    engine = captured_engine(model_on_the_standin(), SMALL, max_batch_size=2)
    stream = engine.stream(PROMPTS[0], PARAMS)
    tokens = [*next(stream).token_ids]
    with engine.timed_phases():
        pass
    for event in stream:
        tokens += event.token_ids
    assert tokens == TEXT


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["none", "eagle3", "fasteagle", "medusa", "glide"])
def test_requests_join_and_leave_and_streams_are_abandoned(device, folders, name):
    engine = captured_engine(model_on_the_standin(), SPECS[name].format(**folders), max_batch_size=3)
    assert engine.generate(PROMPTS[0], PARAMS).token_ids == TEXT

    async def main() -> list[list[int]]:
        async with AsyncEngine(engine) as serving:
            tasks = []
            for prompt in PROMPTS:
                gone = serving.stream(prompt[::-1], PARAMS)
                await anext(gone)
                tasks.append(asyncio.create_task(serving.generate(prompt, PARAMS)))
                await gone.aclose()
            return [output.token_ids for output in await asyncio.gather(*tasks)]

    assert asyncio.run(main()) == [TEXT] * len(PROMPTS)
    assert engine.cache.pages_in_use == 0


@pytest.mark.full
def test_an_engine_is_made_while_another_one_of_its_model_runs(device):
    model = model_on_the_standin()
    with running(captured_engine(model, SMALL, max_batch_size=2)):
        made = captured_engine(model, "none", max_batch_size=2)
        assert made.generate(PROMPTS[0], PARAMS).token_ids == TEXT


@pytest.mark.full
def test_two_engines_take_turns(device):
    model = model_on_the_standin()
    one, other = (captured_engine(model, drafter, max_batch_size=2) for drafter in (SMALL, "none"))
    with running(one), running(other):
        pass


@pytest.mark.full
def test_an_engine_is_dropped_while_another_one_runs_and_its_memory_comes_back(device):
    model = model_on_the_standin()
    with running(captured_engine(model, SMALL, max_batch_size=2)):
        before = len(device.allocator.pools)
        dropped = captured_engine(model, "none", max_batch_size=2)
        assert len(device.allocator.pools) > before
        del dropped
        gc.collect()
        captured_engine(model, "none", max_batch_size=1)
    gc.collect()
    device.empty_cache()
    assert len(device.allocator.pools) == 1


def test_an_engine_that_fails_inside_a_capture_leaves_the_device_to_the_next(device, monkeypatch):
    model = model_on_the_standin()
    survivor = captured_engine(model, SMALL, max_batch_size=2)

    def fail(*_) -> None:
        if device.captures():
            raise ValueError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr("specengine.engine.device.graph_batch.commit_tokens", fail)
        with pytest.raises(ValueError, match="out of luck"):
            captured_engine(model, "none", max_batch_size=2)
    assert device.capture is None
    assert survivor.generate(PROMPTS[0], PARAMS).token_ids == TEXT
    assert captured_engine(model, "none", max_batch_size=2).generate(PROMPTS[0], PARAMS).token_ids == TEXT


def test_a_cycle_that_fails_ends_its_requests_alone(device, monkeypatch):
    engine = captured_engine(model_on_the_standin(), SMALL, max_batch_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(engine.core.runner.graphs, "observe", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(PROMPTS[:2], PARAMS)
    assert [output.token_ids for output in engine.generate(PROMPTS[:2], PARAMS)] == [TEXT, TEXT]
    assert engine.cache.pages_in_use == 0


@pytest.fixture
def replays(simulated, monkeypatch):
    """The simulator, where cycles are timed by one replay."""
    least_seconds = cycle_graphs._least_seconds
    monkeypatch.setattr(cycle_graphs, "_least_seconds", lambda run, device, **_: least_seconds(run, device, repeats=1))
    simulated.set_schedule(0)
    simulated.set_multiprocessors(4)
    return simulated


@pytest.mark.sim
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2-moe", "tiny-gpt-oss"])
def test_captured_cycles_say_what_the_cpu_says(replays, monkeypatch, name):
    """With the kernels of the simulator: every replay works on the memory of its capture."""
    prompts = [PROMPTS[0], PROMPTS[3], PROMPTS[1]]
    expected = [output.token_ids for output in on_the_cpu(SAMPLED, name, prompts)]
    with standing_in(Device(), monkeypatch, replays):
        engine = captured_engine(model_on_the_standin(name), SMALL, max_batch_size=2)
        found = [output.token_ids for output in engine.generate(prompts, SAMPLED)]
    assert found == expected


DRAFTED = {
    "draft_model": "draft_model:self,layers=2,length=3",
    "pard": "pard:{pard},tree=chain,length=3",
    "medusa": "medusa:{medusa},nodes=6",
    "dspark": "dspark:{dspark},nodes=8,top_k=3",
    "domino": "domino:{domino},nodes=8,top_k=3",
}


@pytest.mark.sim
@pytest.mark.quick(1)
@pytest.mark.parametrize("name", DRAFTED)
def test_replays_draft_what_the_cpu_drafts(replays, monkeypatch, folders, name):
    """A tensor of the first replay that a drafter kept would show in the drafts of later ones."""
    spec, greedy = DRAFTED[name].format(**folders) + ",adaptive=false", SamplingParams(max_new_tokens=6, trace=True)
    prompts = [PROMPTS[0], PROMPTS[3]]
    expected = on_the_cpu(greedy, prompts=prompts, drafter=spec, max_batch_size=2)
    with standing_in(Device(), monkeypatch, replays):
        outputs = captured_engine(model_on_the_standin(), spec, max_batch_size=2).generate(prompts, greedy)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [sorted(cycle.tokens) for cycle in ours.trace] == [sorted(cycle.tokens) for cycle in theirs.trace]
    assert max(len(cycle.tokens) for output in outputs for cycle in output.trace) > 3
