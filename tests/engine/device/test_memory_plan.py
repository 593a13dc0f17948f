"""The memory that captured cycles take on a stand-in device, beside what was planned for them."""

import dataclasses

import pytest

from specengine.engine.device import memory_budget
from specengine.engine.device.memory_budget import device_cache, workspace_bytes
from specengine.models import presets
from tests.drafters import eagle_files
from tests.engine.device.captured import captured_engine, model_on_the_standin

VOCAB = 1 << 14  # so large that logits are most of what cycles could keep
DRAFTER = "prompt_lookup,nodes=60,length=59"


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


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "drafter, most, control",
    [(DRAFTER, 16, True), ("eagle3:{eagle3}", 64, False), ("eagle3:{eagle3},top_k=1", 2, False)],
)
def test_the_plan_covers_what_cycles_take_and_keep(device, wide_model, eagle3, monkeypatch, drafter, most, control):
    monkeypatch.setattr(memory_budget, "RESERVE_BYTES", 0)
    caches = {}

    def cache(model, drafter, rule, options):
        caches["before"] = device.allocator.reserved
        caches["plan"] = workspace_bytes(model.target, drafter, rule, options)
        return device_cache(model, drafter, rule, options)

    monkeypatch.setattr("specengine.engine.core.device_cache", cache)
    engine = captured_engine(wide_model, drafter.format(eagle3=eagle3), max_batch_size=most)
    cache = engine.cache.page_bytes + getattr(engine.drafter, "page_bytes", 0)
    taken = device.allocator.reserved - caches["before"] - cache * engine.cache.k.shape[1]
    assert taken <= caches["plan"]
    rows = sum(bucket * width for bucket, width in engine.core.runner.graphs.batches)
    # With logits of every captured cycle it would not be enough.
    assert not control or rows * VOCAB * 4 > caches["plan"]


@pytest.mark.full
def test_no_cycle_keeps_logits(device, wide_model):
    engine = captured_engine(wide_model, DRAFTER, max_batch_size=2)
    (pool,) = {graph.pool() for graph in engine.core.runner.graphs._graphs.values()}
    sizes = [block.size for block in device.allocator.blocks if block.pool is device.allocator.pools[pool]]
    assert sizes and max(sizes) < 4 * VOCAB  # logits of one row
    assert device.allocator.pools[pool].reserved >= 4 * VOCAB * 2 * 60  # the control: a pass computes those of all rows
