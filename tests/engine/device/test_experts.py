"""Mixtures of experts on the device: speculation says what plain decoding says, and rows keep their bits."""

from dataclasses import replace

import pytest
import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.ops import cuda_ops, native
from tests.backends import cpu_kernels
from tests.engine.device.prompts import GREEDY, LOOKUP, PROMPTS, SAMPLED
from tests.engines import ids

FAMILIES = ("tiny-mixtral", "tiny-qwen2-moe", "tiny-qwen3-moe", "tiny-granite-moe")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name, dtype, params",
    [("tiny-mixtral", "bfloat16", GREEDY), ("tiny-qwen2-moe", "int8", SAMPLED)],
    ids=["floats, greedy", "codes, sampled"],
)
def test_speculation_says_what_plain_decoding_says(device_engine, name, dtype, params):
    plain = device_engine("none", name=name, dtype=dtype, max_batch_size=1)
    expected = ids(plain.generate(PROMPTS, params))
    assert ids(device_engine(LOOKUP, name=name, dtype=dtype, max_batch_size=3).generate(PROMPTS, params)) == expected


def logits_of(target, prompts):
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(prompt)) for prompt in prompts], [0] * len(prompts))
    output = target.forward(TreeBatch.chains(prompts, target.device), cache, batch)
    assert (output.hidden_states.experts is None) == target.ops.on_device
    return output.scores.cpu()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_has_the_logits_that_it_has_on_the_cpu(cuda_backend, name):
    checkpoint = RandomCheckpoint(replace(PRESETS[name], dtype=None))
    ops = cuda_ops(cuda_backend.device, strict=True)
    found = logits_of(load_transformer(checkpoint, "float32", cuda_backend.device, ops), PROMPTS)
    with cpu_kernels():
        expected = logits_of(load_transformer(checkpoint, "float32", torch.device("cpu"), native), PROMPTS)
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_a_row_has_the_bits_that_it_has_alone(cuda_backend, dtype):
    ops = cuda_ops(cuda_backend.device, strict=True)
    target = load_transformer(RandomCheckpoint(PRESETS["tiny-qwen2-moe"]), dtype, cuda_backend.device, ops)
    together = logits_of(target, PROMPTS)
    assert torch.equal(torch.cat([logits_of(target, [prompt]) for prompt in PROMPTS]), together)


@pytest.mark.parametrize("name, named", [("tiny-gpt-oss", "attention sinks"), ("tiny-olmoe", "norms of whole q and k")])
def test_what_no_kernel_has_is_refused_before_a_weight_is_read(cuda_backend, name, named):
    with pytest.raises(ValueError, match=rf"^device: .* has {named}.*, which run on the CPU alone"):
        load_transformer(
            RandomCheckpoint(PRESETS[name]), "bfloat16", cuda_backend.device, cuda_ops(cuda_backend.device)
        )
