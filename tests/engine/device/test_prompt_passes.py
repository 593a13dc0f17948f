"""Passes over prompts: the host knows all lengths, so no layer waits for the device."""

import dataclasses

import pytest
import torch

from specengine._C import PAGE_SIZE
from specengine.draft_trees.tree import TreeBatch
from specengine.ops import cuda_ops, tree_attention
from specengine.tensor_parallel.loading import load_model


@pytest.mark.parametrize(
    "strict, rows", [(False, 40), (False, 300), (True, 40), pytest.param(True, 260, marks=pytest.mark.full)]
)
def test_a_pass_over_a_prompt_asks_the_device_for_nothing(cuda_backend, monkeypatch, strict, rows):
    ops = cuda_ops(cuda_backend.device, strict=strict)
    target = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops).target
    target.ensure_positions(2 * rows)
    pages = [*range(-(-2 * rows // PAGE_SIZE))]
    cache = target.new_cache(len(pages))
    tree = TreeBatch.chains([[*range(rows)]], target.device)

    def asked(tree, place):
        reads = []
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append("tolist") or tensor.numpy().tolist())
            patch.setattr(torch.Tensor, "item", lambda tensor: reads.append("item") or tensor.numpy().item())
            return target.hidden_states(tree, cache, place).last, len(reads)

    hidden, reads = asked(tree, cache.batch([pages], [0]))
    assert reads == 0
    if rows == 40:
        behind, reads = asked(tree, cache.batch([pages], [rows]))
        assert reads == 0 and not hidden.equal(behind)
    unknown = cache.batch([pages], [0])
    unknown.host = None  # as on a device that alone knows them
    again, reads = asked(dataclasses.replace(tree, starts=None), unknown)
    assert again.equal(hidden) and reads > 0


def test_lengths_that_the_device_advanced_are_unknown_to_the_host(cuda_backend):
    ops = cuda_ops(cuda_backend.device)
    target = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops).target
    place = target.new_cache(2).batch([[0, 1]], [5])
    assert place.host is not None and place.host.tolist() == [5]
    place.advance(torch.tensor([3], dtype=torch.int32, device=target.device))
    assert place.host is None and place.lengths.tolist() == [8]


RUNS = [[*range(300)], [7] * 20, [*range(5, 275)]]
BEFORE = [70, 0, 129]  # cached tokens: most passes begin within a page


@pytest.mark.quick(2)
@pytest.mark.parametrize("name, prompts", [("tiny-llama3", 3), pytest.param("tiny-qwen3.5", 2, marks=pytest.mark.full)])
def test_long_and_short_prompts_are_read_as_by_pytorchs_attention(cuda_backend, monkeypatch, name, prompts):
    ops = cuda_ops(cuda_backend.device)
    target = load_model(f"random:{name}", device=cuda_backend.device.type, dtype="bfloat16", ops=ops).target
    target.ensure_positions(512)
    calls, attend = [], tree_attention.causal_attention
    runs, lengths = RUNS[:prompts], BEFORE[:prompts]

    def passed(most):
        monkeypatch.setattr(tree_attention, "LIBRARY_FROM", most)
        cache = target.new_cache(32)
        pages = [cache.allocate(length + len(run)) for run, length in zip(runs, lengths, strict=True)]
        earlier = TreeBatch.chains([[3 + b] * length for b, length in enumerate(lengths)], target.device)
        target.hidden_states(earlier, cache, cache.batch(pages, [0] * prompts))
        calls.clear()
        return target.hidden_states(TreeBatch.chains(runs, target.device), cache, cache.batch(pages, lengths)).last

    monkeypatch.setattr(tree_attention, "causal_attention", lambda q, *rest: calls.append(len(q)) or attend(q, *rest))
    by_kernel, found = passed(1 << 33), len(calls)
    by_pytorch = passed(0)
    assert found == 0 and calls == [len(run) for run in runs] * target.config.attention_layers
    assert (by_kernel - by_pytorch).norm() < 0.02 * by_pytorch.norm()
