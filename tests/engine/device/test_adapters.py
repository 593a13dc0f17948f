"""Adapters in cycles on the device: a captured cycle serves every adapter, and none."""

import dataclasses

import pytest

from specengine.models.presets import PRESETS
from tests.adapters.files import tiny_adapters, write_adapter
from tests.engine.device.prompts import GREEDY, LOOKUP, PROMPTS, SAMPLED, on_the_cpu
from tests.engines import ids

CHOICES = ("a", None, "b", "c")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return tiny_adapters(tmp_path_factory.mktemp("adapters"))


def with_adapters(params):
    return [dataclasses.replace(params, adapter=name) for name in CHOICES]


def test_the_device_says_with_adapters_what_the_cpu_says(device_engine, adapters):
    params = [dataclasses.replace(each, max_new_tokens=3) for each in with_adapters(SAMPLED)]
    prompts = [[5, 9, 13], [7], [3, 4], [11, 12]]
    expected = ids(on_the_cpu(params, prompts=prompts, adapters=adapters))
    assert expected != ids(on_the_cpu(dataclasses.replace(SAMPLED, max_new_tokens=3), prompts=prompts))
    # slots change their requests, and so their adapters
    engine = device_engine("none", max_batch_size=3, adapters=adapters)
    assert ids(engine.generate(prompts, params)) == expected


@pytest.mark.full
def test_trees_on_the_device_say_with_adapters_what_the_cpu_says(device_engine, adapters):
    params = with_adapters(SAMPLED)
    expected = ids(on_the_cpu(params, adapters=adapters))
    engine = device_engine(LOOKUP, max_batch_size=3, adapters=adapters)
    assert ids(engine.generate(PROMPTS, params)) == expected
    assert ids(engine.generate(PROMPTS, SAMPLED)) == ids(on_the_cpu(SAMPLED))


@pytest.mark.full
def test_a_mixed_batch_on_the_device_has_the_bits_of_single_runs(device_engine, adapters):
    params = [dataclasses.replace(each, logprobs=2) for each in with_adapters(GREEDY)]
    together = device_engine(LOOKUP, max_batch_size=4, adapters=adapters).generate(PROMPTS, params)
    alone = device_engine("none", max_batch_size=1, adapters=adapters)
    for prompt, own, output in zip(PROMPTS, params, together, strict=True):
        assert alone.generate(prompt, own).logprobs == output.logprobs
    bare = device_engine("none", max_batch_size=1).generate(PROMPTS[1], dataclasses.replace(GREEDY, logprobs=2))
    assert bare.logprobs == together[1].logprobs


@pytest.mark.full
def test_a_hybrid_on_the_device_says_with_adapters_what_the_cpu_says(device_engine, tmp_path):
    name = "tiny-qwen3.5"
    modules = ("q_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "down_proj")
    adapters = {each: write_adapter(tmp_path / each, PRESETS[name], modules=modules, seed=ord(each)) for each in "abc"}
    params = [dataclasses.replace(each, max_new_tokens=4) for each in with_adapters(SAMPLED)]
    prompts = [[5, 9, 13, 5, 9], [7], [3, 4, 3], [11, 12, 11]]
    expected = ids(on_the_cpu(params, name, prompts, adapters=adapters))
    assert expected != ids(on_the_cpu(dataclasses.replace(SAMPLED, max_new_tokens=4), name, prompts))
    engine = device_engine(LOOKUP, name=name, max_batch_size=3, adapters=adapters)
    assert ids(engine.generate(prompts, params)) == expected
