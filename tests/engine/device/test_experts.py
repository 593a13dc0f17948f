"""Mixtures of experts on the device: speculation says what plain decoding says, and rows keep their bits."""

import dataclasses

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.ops import cuda_ops, native
from specengine.tensor_parallel.loading import LoadedModel
from tests.backends import cpu_kernels
from tests.engine.device.prompts import GREEDY, LOOKUP, PROMPTS, SAMPLED
from tests.engine.prefixes import SPECS
from tests.engines import ids

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
FAMILIES = ("tiny-mixtral", "tiny-qwen2-moe", "tiny-qwen3-moe", "tiny-olmoe", "tiny-granite-moe", "tiny-gpt-oss")
NAMES = [name for name in SPECS if name not in ("none", "mtp")]  # mtp has the layer of its own target
REPEATING = [[3 + i, 9, 27, 81, 3 + i, 9, 27, 40 + i] for i in range(4)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name, dtype, params",
    [("tiny-mixtral", "bfloat16", GREEDY), ("tiny-qwen2-moe", "int8", SAMPLED), ("tiny-gpt-oss", "int4", SAMPLED)],
    ids=["floats, greedy", "codes, sampled", "sinks, sampled"],
)
def test_speculation_says_what_plain_decoding_says(device_engine, name, dtype, params):
    plain = device_engine("none", name=name, dtype=dtype, max_batch_size=1)
    expected = ids(plain.generate(PROMPTS, params))
    assert ids(device_engine(LOOKUP, name=name, dtype=dtype, max_batch_size=3).generate(PROMPTS, params)) == expected


@pytest.fixture(scope="module")
def mixtures():
    """Strict models on the device by family, with heads that the drafters of these tests fit, and their plain texts."""
    return {}, {}


def params_of(temperature):
    return SamplingParams(max_new_tokens=6, temperature=temperature, seed=5, logprobs=2, trace=True)


def bits(outputs):
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.quick(6)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_drafter_changes_a_token_or_a_logit_of_a_mixture(
    cuda_backend, mixtures, folders, family, name, temperature, batch
):
    models, texts = mixtures
    if (cuda_backend, family) not in models:
        config = dataclasses.replace(PRESETS[family], head_dim=PRESETS["tiny-llama"].head_dim)
        ops = cuda_ops(cuda_backend.device, strict=True)
        target = load_transformer(RandomCheckpoint(config), "float32", cuda_backend.device, ops)
        models[cuda_backend, family] = LoadedModel(family, "float32", target, None, frozenset())
    model, prompts, params = models[cuda_backend, family], REPEATING[:batch], params_of(temperature)
    key = cuda_backend, family, temperature, batch
    if key not in texts:
        texts[key] = bits(Engine(model, drafter="none", max_batch_size=1).generate(prompts, params))
    outputs = Engine(model, drafter=SPECS[name].format(**folders), max_batch_size=batch).generate(prompts, params)
    assert bits(outputs) == texts[key]


def logits_of(target, prompts):
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(prompt)) for prompt in prompts], [0] * len(prompts))
    output = target.forward(TreeBatch.chains(prompts, target.device), cache, batch)
    assert (output.hidden_states.experts is None) == target.ops.on_device
    return output.scores.cpu()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("strict", [True, False])
def test_a_model_has_the_logits_that_it_has_on_the_cpu(cuda_backend, name, strict):
    checkpoint = RandomCheckpoint(dataclasses.replace(PRESETS[name], dtype=None))
    ops = cuda_ops(cuda_backend.device, strict=strict)
    found = logits_of(load_transformer(checkpoint, "float32", cuda_backend.device, ops), PROMPTS)
    with cpu_kernels():
        expected = logits_of(load_transformer(checkpoint, "float32", torch.device("cpu"), native), PROMPTS)
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("name", ["tiny-qwen2-moe", "tiny-olmoe", "tiny-gpt-oss"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_a_row_has_the_bits_that_it_has_alone(cuda_backend, name, dtype):
    ops = cuda_ops(cuda_backend.device, strict=True)
    target = load_transformer(RandomCheckpoint(PRESETS[name]), dtype, cuda_backend.device, ops)
    together = logits_of(target, PROMPTS)
    assert torch.equal(torch.cat([logits_of(target, [prompt]) for prompt in PROMPTS]), together)
