"""Mixtures of experts on the device: speculation says what plain decoding says, and rows keep their bits."""

import itertools
from dataclasses import dataclass, field, replace

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
DRAWN = SamplingParams(max_new_tokens=5, seed=5, logprobs=2, trace=True)
REPEATING = [[3 + i, 9, 27, 81, 40 + i, 3 + i, 9, 27] for i in range(4)]  # prompt_lookup drafts at once


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


@dataclass
class Mixture:
    """A strict model on the device, and what plain decoding says on it by number of requests."""

    model: LoadedModel
    texts: dict[int, list] = field(default_factory=dict)


@pytest.fixture(scope="module")
def mixtures():
    return {}


def mixture(family: str, device: torch.device) -> Mixture:
    """Of few small experts in two layers, with heads that the drafters of these tests fit."""
    preset = PRESETS[family]
    experts = replace(preset.moe, num_experts=4, experts_per_token=2, intermediate_size=24)
    layers = {"num_layers": 2, "sliding_layers": preset.sliding_layers[:2]}
    config = replace(preset, head_dim=PRESETS["tiny-llama"].head_dim, moe=experts, **layers)
    target = load_transformer(RandomCheckpoint(config), "float32", device, cuda_ops(device, strict=True))
    return Mixture(LoadedModel(family, "float32", target, None, frozenset()))


@pytest.mark.quick(8)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("family, name", zip(itertools.cycle(FAMILIES), NAMES, strict=False))
def test_no_drafter_changes_a_token_or_a_logit_of_a_mixture(cuda_backend, mixtures, folders, family, name, batch):
    """Of requests at temperatures 0 and 0.8: two after each other, or four in one batch."""
    key = cuda_backend, family
    if key not in mixtures:
        mixtures[key] = mixture(family, cuda_backend.device)
    model, texts, count = mixtures[key].model, mixtures[key].texts, max(2, batch)
    params = [replace(DRAWN, temperature=0.8 * (i % 2)) for i in range(count)]
    prompts = REPEATING[:count]
    if count not in texts:
        plain = Engine(model, drafter="none", max_batch_size=1).generate(prompts, params)
        texts[count] = [(output.token_ids, output.logprobs) for output in plain]
    outputs = Engine(model, drafter=SPECS[name].format(**folders), max_batch_size=batch).generate(prompts, params)
    assert [(output.token_ids, output.logprobs) for output in outputs] == texts[count]
    assert max(len(cycle.tokens) for output in outputs for cycle in output.trace) > 1  # else the comparison is idle


def logits_of(target, prompts):
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(prompt)) for prompt in prompts], [0] * len(prompts))
    output = target.forward(TreeBatch.chains(prompts, target.device), cache, batch)
    assert (output.hidden_states.experts is None) == target.ops.on_device
    return output.scores.cpu()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("strict", [True, False])
def test_a_model_has_the_logits_that_it_has_on_the_cpu(cuda_backend, name, strict):
    checkpoint = RandomCheckpoint(replace(PRESETS[name], dtype=None))
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
