"""Captured cycles of several devices: every rank captures its part, and replays it with the others."""

import dataclasses
import gc
import os
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from specengine import Engine, RankFailed
from specengine.draft_trees.tree import TreeBatch
from specengine.tensor_parallel import rank_processes
from specengine.tensor_parallel.device.collectives import Collectives
from specengine.tensor_parallel.device.follower import DeviceFollower
from specengine.tensor_parallel.device.messages import BeginCapture, DropGraphs, EndCapture
from specengine.tensor_parallel.device.passes import DevicePasses
from specengine.tensor_parallel.loading import load_model
from specengine.utils.cuda_graphs import DeviceGraphs, device_turn
from tests.drafters.eagle_files import layouts, write_drafter
from tests.engine.device.prompts import GREEDY, LOOKUP, PROMPTS, SAMPLED, on_the_cpu
from tests.tensor_parallel.captured import RANKS, StandinCollectives, captured_ranks, standin_ops
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


@ON_THE_SIMULATOR
def test_a_failed_capture_leaves_the_ranks_in_step(monkeypatch):
    with captured_ranks(monkeypatch):
        target, runs = captured_model().target, []
        cache = target.new_cache(4)
        place = cache.batch([cache.allocate(40)], [0])
        tree = TreeBatch.chains([[5, 6, 7]], target.device, masked=True)
        torch.cuda.synchronize(target.device)  # passes run on another stream than wrote all this

        def run():
            runs.append(target.forward(tree, cache, place).scores.clone())
            if len(runs) == 2:
                raise MemoryError("no room for a drafter")

        with pytest.raises(MemoryError), device_turn(target.device):
            target.graphs.capture(run)
        with device_turn(target.device):  # the ranks would capture this pass, and this one wait for them
            run()
            graph = target.graphs.capture(run)
            graph.replay()
            assert runs[0].tolist() == runs[2].tolist() == runs[4].tolist()


@pytest.mark.parametrize("run_before", [True, False])
def test_the_other_ranks_drop_a_graph_that_the_first_one_does_not_get(monkeypatch, run_before):
    sent, dropped = [], []

    @contextmanager
    def broadcast(message):
        sent.append(type(message))
        yield

    def capture_graph(run, device, *, pool, warm_up):
        if run_before:
            run()
        raise MemoryError("no room for the graph")  # behind the last message of the capture, or before the first one

    monkeypatch.setattr("specengine.tensor_parallel.device.passes.capture_graph", capture_graph)
    passes = DevicePasses.__new__(DevicePasses)
    DeviceGraphs.__init__(passes, torch.device("cpu"))
    passes._group = SimpleNamespace(failure=None, broadcast=broadcast, drop_graph=dropped.append)
    passes._numbers = iter([7])
    with pytest.raises(MemoryError):
        passes.capture(lambda: None)
    assert sent == [BeginCapture, EndCapture] * run_before and dropped == [7]
    follower = DeviceFollower((1, 2, torch.device("cpu")), 8, lambda: None, lambda _: None, None, {})
    follower.handlers[DropGraphs](DropGraphs((7,)))  # it may not have begun


def test_a_wait_for_a_device_tells_of_a_rank_that_ended_meanwhile():
    passes = DevicePasses.__new__(DevicePasses)
    DeviceGraphs.__init__(passes, torch.device("cpu"))
    passes._group = SimpleNamespace(failure=None, waiting=nullcontext)
    passes.wait_for(SimpleNamespace(synchronize=lambda: None))
    ended = SimpleNamespace(synchronize=lambda: setattr(passes._group, "failure", "rank 1 ended"))
    with pytest.raises(RankFailed, match="rank 1 ended; make a new engine"):
        passes.wait_for(ended)


@ON_THE_SIMULATOR
def test_collectives_are_aborted_when_a_rank_ends_whatever_the_first_waits_for(monkeypatch):
    others, aborted, released = {child.pid for child in ranks()}, threading.Event(), threading.Event()

    def abort(collectives):
        aborted.set()
        released.wait()  # as NCCL waits for graphs

    with captured_ranks(monkeypatch):
        monkeypatch.setattr(StandinCollectives, "abort", abort)
        model = captured_model()
        assert not aborted.wait(0.2)
        own(others)[-1].kill()
        assert aborted.wait(10)
        assert "was ended by signal 9" in model.target.failure
        released.set()


@ON_THE_SIMULATOR
def test_a_cycle_that_does_not_end_ends_all(monkeypatch):
    others, aborted = {child.pid for child in ranks()}, threading.Event()
    monkeypatch.setattr(rank_processes, "CYCLE_SECONDS", 0.5)
    with captured_ranks(monkeypatch):
        monkeypatch.setattr(StandinCollectives, "abort", lambda _: aborted.set())
        target = captured_model().target
        own(others)[-1].suspend()
        target.graphs.wait_for(SimpleNamespace(synchronize=lambda: None))  # a cycle that ends
        assert not aborted.wait(0.8)
        with pytest.raises(RankFailed, match=r"a cycle took longer than 0\.5 s; make a new engine"):
            target.graphs.wait_for(SimpleNamespace(synchronize=lambda: aborted.wait(10)))
        assert aborted.is_set() and target.failure == "a cycle took longer than 0.5 s"


@ON_THE_SIMULATOR
def test_a_dropped_model_ends_its_collectives(monkeypatch):
    aborted = threading.Event()
    with captured_ranks(monkeypatch):
        monkeypatch.setattr(StandinCollectives, "abort", lambda _: aborted.set())
        model = captured_model()
        assert not aborted.wait(0.2)
        del model
        gc.collect()
        assert aborted.wait(10)


def test_no_thread_of_torch_judges_the_collectives(monkeypatch):
    seen = {}

    def group(store, rank, size, options):
        seen.update({name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL")})
        return SimpleNamespace(allreduce=lambda _: SimpleNamespace(wait=lambda: None))

    group.Options = lambda: None
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", group, raising=False)
    monkeypatch.setattr(torch.distributed, "FileStore", lambda *_: SimpleNamespace(set_timeout=lambda _: None))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    before = dict(os.environ)
    Collectives("/nowhere/ranks", 0, 1, torch.device("cuda"))
    assert set(seen.values()) == {"0"} and len(seen) == 3
    assert os.environ == before
