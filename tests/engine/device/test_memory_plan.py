"""The memory that captured cycles take on a stand-in device, beside what was planned for them."""

import dataclasses

import pytest

from specengine.engine.device import memory_budget
from specengine.engine.device.memory_budget import DeviceOptions, device_cache, workspace_bytes
from specengine.models import presets
from tests.drafters import eagle_files
from tests.engine.device.captured import captured_engine, model_on_the_standin

VOCAB = 1 << 14  # so large that logits are most of what cycles could keep
DRAFTER = "prompt_lookup,nodes=60,length=59"
OPTIONS = DeviceOptions(max_batch_size=16, gpu_memory_fraction=0.9, graphs=True)


@pytest.fixture
def wide_model(device, monkeypatch):
    tiny = presets.PRESETS["tiny-llama"]
    monkeypatch.setitem(presets.PRESETS, "wide", dataclasses.replace(tiny, vocab_size=VOCAB))
    return model_on_the_standin("wide")


@pytest.fixture
def eagle3(tmp_path):
    """A drafter with a head of the whole vocabulary."""
    config = eagle_files.CONFIG | {"vocab_size": VOCAB}
    return eagle_files.write_drafter(tmp_path / "eagle3", config, eagle_files.eagle3_state(config, d2t=False))


@pytest.fixture
def taken_and_planned(device, monkeypatch):
    """Makes an engine, and returns it with the bytes that its cycles take and those that were planned for them."""
    monkeypatch.setattr(memory_budget, "RESERVE_BYTES", 0)
    caches = {}

    def cache(model, drafter, rule, options):
        caches["before"] = device.allocator.reserved
        caches["plan"] = workspace_bytes(model.target, drafter, rule, options)
        return device_cache(model, drafter, rule, options)

    monkeypatch.setattr("specengine.engine.core.device_cache", cache)

    def make(model, drafter, most):
        engine = captured_engine(model, drafter, max_batch_size=most)
        page = engine.cache.page_bytes + getattr(engine.drafter, "page_bytes", 0)
        taken = device.allocator.reserved - caches["before"] - page * engine.cache.k.shape[1]
        return engine, taken, caches["plan"]

    return make


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "drafter, most, control",
    [(DRAFTER, 16, True), ("eagle3:{eagle3}", 64, False), ("eagle3:{eagle3},top_k=1", 2, False)],
)
def test_the_plan_covers_what_cycles_take_and_keep(taken_and_planned, wide_model, eagle3, drafter, most, control):
    engine, taken, planned = taken_and_planned(wide_model, drafter.format(eagle3=eagle3), most)
    assert taken <= planned
    rows = sum(bucket * width for bucket, width in engine.core.runner.graphs.batches)
    # With logits of every captured cycle it would not be enough.
    assert not control or rows * VOCAB * 4 > planned


@pytest.mark.full
def test_the_plan_covers_the_experts_of_a_mixture(taken_and_planned, monkeypatch):
    """Each row takes 32 experts, so their outputs are most of what a pass holds."""
    tiny = presets.PRESETS["tiny-qwen2-moe"]
    moe = dataclasses.replace(tiny.moe, num_experts=64, experts_per_token=32, intermediate_size=256)
    monkeypatch.setitem(presets.PRESETS, "many", dataclasses.replace(tiny, moe=moe))
    model = model_on_the_standin("many")
    _, taken, planned = taken_and_planned(model, DRAFTER, 16)
    assert taken <= planned
    monkeypatch.setattr(memory_budget, "_mlp_columns", lambda config: 3 * config.intermediate_size)
    _, taken, planned = taken_and_planned(model, DRAFTER, 16)
    assert taken > planned  # the control: the plan of a dense model would not be enough


@pytest.mark.full
def test_the_plan_covers_the_states_and_records_of_a_hybrid(taken_and_planned, monkeypatch):
    model = model_on_the_standin("tiny-qwen3.5")
    engine, taken, planned = taken_and_planned(model, DRAFTER, 16)
    states = engine.cache.states
    assert 2 * 16 * states.slot_bytes == states.memory.states.nbytes + states.memory.conv.nbytes
    assert taken <= planned + 2 * 16 * states.slot_bytes
    monkeypatch.setattr(type(states), "record_bytes", lambda pool, rows: 0)
    without = workspace_bytes(model.target, engine.drafter, engine.core.rule, OPTIONS)
    assert planned - without >= states.memory.records.nbytes > 0


@pytest.mark.full
def test_no_cycle_keeps_logits(device, wide_model):
    engine = captured_engine(wide_model, DRAFTER, max_batch_size=2)
    (pool,) = {graph.pool() for graph in engine.core.runner.graphs._graphs.values()}
    sizes = [block.size for block in device.allocator.blocks if block.pool is device.allocator.pools[pool]]
    assert sizes and max(sizes) < 4 * VOCAB  # logits of one row
    assert device.allocator.pools[pool].reserved >= 4 * VOCAB * 2 * 60  # the control: a pass computes those of all rows
