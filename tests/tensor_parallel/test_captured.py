"""Captured cycles of several devices: every rank captures its part, and replays it with the others."""

import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch

from specengine import Engine, RankFailed
from specengine.tensor_parallel.device.passes import DevicePasses
from specengine.tensor_parallel.loading import load_model
from specengine.utils.cuda_graphs import DeviceGraphs
from tests.drafters.eagle_files import layouts, write_drafter
from tests.engine.device.prompts import GREEDY, LOOKUP, PROMPTS, SAMPLED, on_the_cpu
from tests.tensor_parallel.captured import RANKS, captured_ranks, standin_ops
from tests.tensor_parallel.kills import own, ranks

ON_THE_SIMULATOR = pytest.mark.sim


@pytest.fixture
def expected():
    """What the CPU says, by parameters."""
    return {params: [each.token_ids for each in on_the_cpu(params)] for params in (GREEDY, SAMPLED)}


def captured_model():
    ops = standin_ops(torch.device("cuda"), strict=True)
    model = load_model("random:tiny-llama", device="cuda", dtype="float32", tensor_parallel=RANKS, ops=ops)
    return dataclasses.replace(model, eos_token_ids=frozenset())


def spoken(engine, every):
    return {params: [each.token_ids for each in engine.generate(PROMPTS, params)] for params in every}


@ON_THE_SIMULATOR
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:drafter")  # a random one guesses nothing
def test_replays_of_all_ranks_have_the_text_of_one_process(monkeypatch, expected, tmp_path):
    name, config, state, *_ = layouts()["official"]
    write_drafter(tmp_path, config, state)
    tree = f"{name}:{tmp_path},nodes=4,levels=2,adaptive=false"
    with captured_ranks(monkeypatch):
        model = captured_model()
        for drafter, size in ((LOOKUP, 2), (tree, 1)):
            engine = Engine(model, drafter=drafter, max_batch_size=size)
            assert engine.core.runner.graphs._graphs.keys() == engine.core.runner.graphs.batches.keys()
            assert spoken(engine, expected) == expected
            del engine  # the ranks drop its graphs with the next message
            gc.collect()


@ON_THE_SIMULATOR
@pytest.mark.full
def test_a_rank_that_ends_between_replays_ends_all(monkeypatch):
    others = {child.pid for child in ranks()}
    with captured_ranks(monkeypatch):
        engine = Engine(captured_model(), drafter="none")
        events = engine.stream([5, 6], dataclasses.replace(GREEDY, max_new_tokens=200))
        next(events)
        own(others)[-1].kill()
        with pytest.raises(RankFailed, match="was ended by signal 9"):
            for _ in events:
                pass


def test_a_wait_for_a_device_ends_with_a_rank():
    aborted, looks = [], []

    def query():
        looks.append(None)
        if len(looks) > 2:
            passes._group.failure = "rank 1 ended"
        return False

    passes = DevicePasses.__new__(DevicePasses)
    DeviceGraphs.__init__(passes, torch.device("cpu"))
    passes._group = SimpleNamespace(failure=None)
    passes._collectives = SimpleNamespace(abort=lambda: aborted.append(None))
    with pytest.raises(RankFailed, match="rank 1 ended; make a new engine"):
        passes.wait_for(SimpleNamespace(query=query))
    assert len(aborted) == 1 and len(looks) == 3
