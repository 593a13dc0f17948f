"""Captured engines on a stand-in device that runs nothing: whether their construction keeps the rules of CUDA."""

import threading

import pytest

from specengine.utils.cuda_graphs import device_turn
from tests.cuda_standin.device import CUDA
from tests.engine.device.captured import captured_engine, model_on_the_standin
from tests.engine.device.prompts import LOOKUP
from tests.engine.prefixes import SPECS

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
ON_DEVICE = (
    "dflash",
    "domino chain",
    "dspark",
    "jetspec chain",
    "eagle",
    "eagle3",
    "eagle3 backbone",
    "fasteagle",
    "medusa",
    "glide",
)


@pytest.mark.quick(1)
@pytest.mark.parametrize("drafter", ["none", LOOKUP, "prompt_lookup,nodes=5"])
def test_every_bucket_and_width_is_captured(device, drafter):
    engine = captured_engine(model_on_the_standin(), drafter, max_batch_size=3)
    assert {bucket for bucket, _ in engine.core.runner.graphs.batches} == {1, 2, 3}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ON_DEVICE)
def test_drafters_draft_inside_captured_cycles(device, folders, name):
    captured_engine(model_on_the_standin(), SPECS[name].format(**folders), max_batch_size=2)


def test_cycles_of_a_hybrid_are_captured_on_a_pool_of_states_that_never_moves(device):
    engine = captured_engine(model_on_the_standin("tiny-qwen3.5"), LOOKUP, max_batch_size=2)
    states, graphs = engine.cache.states, engine.core.runner.graphs
    assert states.memory.slots == 4
    for batch in graphs.batches.values():
        assert batch.cache.states.last.states.data_ptr() == states.memory.states.data_ptr()


@pytest.mark.full
def test_phases_are_timed_by_a_second_set_of_captures(device):
    engine = captured_engine(model_on_the_standin(), "prompt_lookup,nodes=3", max_batch_size=2)
    runner = engine.core.runner
    with engine.timed_phases() as timings:
        for size, nodes in runner.graphs.batches:
            runner.graphs.run(size, nodes)
        assert len(timings) == len(runner.graphs.batches)
        assert all({"draft", "verify", "accept", "compact"} <= seconds.keys() for seconds in timings)


@pytest.mark.full
def test_engines_made_side_by_side_capture_one_after_the_other(device):
    model, failed = model_on_the_standin(), []

    def make() -> None:
        try:
            for _ in range(3):
                captured_engine(model, "prompt_lookup,nodes=3", max_batch_size=2)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_device_is_one_thread_s_at_a_time(device):
    entered, last = threading.Event(), []

    def enter() -> None:
        with device_turn(CUDA):
            last.append("second")
            entered.set()

    thread = threading.Thread(target=enter)
    with device_turn(CUDA):
        thread.start()
        assert not entered.wait(0.1)
        last.append("first")
    thread.join()
    assert last == ["first", "second"]
