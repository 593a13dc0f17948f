"""Prompts that are read in one pass on the device: one launch of attention, and the bits of single passes."""

import dataclasses

import pytest
import torch

from specengine import Engine
from specengine._C import PAGE_SIZE
from specengine.draft_trees.tree import TreeBatch
from specengine.engine.prefill import Prefill
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import load_model
from tests.engine.prefixes import SPECS
from tests.engines import GREEDY, ids

SHORT = dataclasses.replace(GREEDY, max_new_tokens=2)
PROMPTS = [[first + i for i in range(10)] for first in range(3, 10)]  # of 9 rows; a strict pass has 64


@pytest.fixture
def passes(monkeypatch):
    """The prompts of each pass of the target."""
    found, chains = [], TreeBatch.chains

    def watched(runs, device, *, masked=False):
        if not masked:  # a drafter's are
            found.append(len(runs))
        return chains(runs, device, masked=masked)

    def run(prefill):
        with monkeypatch.context() as patch:
            patch.setattr(TreeBatch, "chains", staticmethod(watched))
            return read(prefill)

    read = Prefill.run
    monkeypatch.setattr(Prefill, "run", run)
    return found


@pytest.mark.parametrize("name", ["none", pytest.param("eagle3", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:drafter")  # a random one guesses nothing
def test_short_prompts_are_read_together_and_say_what_they_say_alone(device_engine, folders, passes, monkeypatch, name):
    engine = device_engine(SPECS[name].format(**folders), max_batch_size=8)
    together = engine.generate(PROMPTS, SHORT)
    assert passes == [7]
    passes.clear()
    monkeypatch.setattr(Prefill, "has_room", property(lambda prefill: not prefill.requests))
    assert ids(engine.generate(PROMPTS, SHORT)) == ids(together)
    assert passes == 7 * [1]


@pytest.mark.full
def test_a_hybrids_prompts_are_read_together(device_engine, passes, monkeypatch):
    engine = device_engine("none", name="tiny-qwen3.5", max_batch_size=4)
    together = engine.generate(PROMPTS[:3], SHORT)
    assert passes == [3]
    monkeypatch.setattr(Prefill, "has_room", property(lambda prefill: not prefill.requests))
    assert ids(engine.generate(PROMPTS[:3], SHORT)) == ids(together)


@pytest.mark.parametrize("strict", [False, True])
def test_a_pass_over_several_prompts_asks_the_device_for_nothing(cuda_backend, monkeypatch, strict):
    ops = cuda_ops(cuda_backend.device, strict=strict)
    target = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops).target
    runs = [[*range(3, 30)], [7], [*range(40, 60)]]
    pages = [[0], [1], [2]]
    cache, reads = target.new_cache(len(pages)), []
    single = [
        target.hidden_states(TreeBatch.chains([run], target.device), cache, cache.batch([own], [0])).last
        for run, own in zip(runs, pages, strict=True)
    ]
    for masked in (True, False):
        tree, place = TreeBatch.chains(runs, target.device, masked=masked), cache.batch(pages, [0, 0, 0])
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append("tolist") or tensor.numpy().tolist())
            patch.setattr(torch.Tensor, "item", lambda tensor: reads.append("item") or tensor.numpy().item())
            hidden_states = target.hidden_states(tree, cache, place)
        assert reads == []
        parts = [own.last for own in hidden_states.split([len(run) for run in runs])]
        assert not strict or all(own.equal(alone) for own, alone in zip(parts, single, strict=True))
        for own, alone in zip(parts, single, strict=True):
            torch.testing.assert_close(own, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_arithmetic_that_is_not_strict_reads_whole_passes_alone(cuda_backend, passes, dtype):
    """So pages that others find have the bits that they have alone."""
    ops = dataclasses.replace(cuda_ops(cuda_backend.device), prefill_rows=PAGE_SIZE)
    model = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype=dtype, ops=ops)
    engine = Engine(dataclasses.replace(model, eos_token_ids=frozenset()), drafter="none", max_batch_size=4)
    prompts = [PROMPTS[0], [*range(100, 170)], PROMPTS[1], PROMPTS[2]]
    outputs = engine.generate(prompts, SHORT)
    assert passes == [3, 1, 1]
    assert engine.cache.prefixes.cached == 1
    again = engine.generate(prompts[1], SHORT)
    assert again.stats.prefix_hit_tokens == PAGE_SIZE and again.token_ids == outputs[1].token_ids
