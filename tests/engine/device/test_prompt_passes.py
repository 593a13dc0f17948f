"""Passes over prompts: the host knows all lengths, so no layer waits for the device."""

import dataclasses

import pytest
import torch

from specengine._C import PAGE_SIZE
from specengine.draft_trees.tree import TreeBatch
from specengine.ops import cuda_ops
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
    asks = not strict or rows > 256  # shorter strict chains are read by the kernel
    assert again.equal(hidden) and (reads > 0) == asks


def test_lengths_that_the_device_advanced_are_unknown_to_the_host(cuda_backend):
    ops = cuda_ops(cuda_backend.device)
    target = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops).target
    place = target.new_cache(2).batch([[0, 1]], [5])
    assert place.host is not None and place.host.tolist() == [5]
    place.advance(torch.tensor([3], dtype=torch.int32, device=target.device))
    assert place.host is None and place.lengths.tolist() == [8]
