"""Medusa and GLIDE beside a target on the device: the CUDA kernels on the simulator, or on a GPU where there is one."""

import dataclasses

import pytest

from specengine import Engine, SamplingParams
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import load_model
from tests import engines
from tests.backends import cpu_kernels
from tests.drafters import glide_files, medusa_files
from tests.engines import ids

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
PROMPTS = [[5, 9, 13, 5, 9], [7], [11, 12, 11, 12, 11, 12, 11]]
GREEDY, SAMPLED = (dataclasses.replace(each, max_new_tokens=8) for each in (engines.GREEDY, engines.SAMPLED))


@pytest.fixture
def tiny_target(cuda_backend):
    """A tiny float32 model on the CPU, and the same on the device."""
    ops = cuda_ops(cuda_backend.device, strict=True)
    with cpu_kernels():
        model = load_model("random:tiny-llama", device="cpu", dtype="float32")
    return model, load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops)


def folder_of(name, folder):
    if name == "medusa":
        return medusa_files.write(folder, medusa_files.heads_state(vocab=0))
    config = {**glide_files.JSON, "num_hidden_layers": 1}
    return glide_files.write(folder, glide_files.glide_state(config), config)


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["medusa:{},nodes=6", "glide:{},length=2", "glide:{},length=2,cape=false"])
def test_the_device_says_and_drafts_what_the_cpu_does(tiny_target, drafter, params, tmp_path):
    model, on_device = tiny_target
    text = drafter.format(folder_of(drafter.partition(":")[0], tmp_path)) + ",adaptive=false"
    traced = dataclasses.replace(params, trace=True)
    with cpu_kernels():
        plain = ids(Engine(model, drafter="none").generate(PROMPTS, params))
        expected = Engine(model, drafter=text, max_batch_size=2).generate(PROMPTS, traced)
    outputs = Engine(on_device, drafter=text, max_batch_size=2).generate(PROMPTS, traced)
    assert ids(outputs) == plain
    for ours, theirs in zip(outputs, expected, strict=True):
        assert [(set(c.tokens), c.accepted) for c in ours.trace] == [(set(c.tokens), c.accepted) for c in theirs.trace]
    assert any(len(cycle.tokens) > 1 for output in outputs for cycle in output.trace)


def test_right_drafts_are_accepted_to_the_last_level(tiny_target, tmp_path):
    config = {**glide_files.JSON, "num_hidden_layers": 1}
    state = glide_files.glide_state(config)
    state["lm_head.weight"].zero_()  # drafts the lowest id
    text = f"glide:{glide_files.write(tmp_path, state, config)},length=2,cape=false,adaptive=false"
    zeros = SamplingParams(max_new_tokens=9, logit_bias={0: 1e4})
    for output in Engine(tiny_target[1], drafter=text, max_batch_size=2).generate([[5, 6], [7, 8, 9]], zeros):
        assert output.token_ids == [0] * 9 and output.stats.cycles == 3
