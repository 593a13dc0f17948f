"""Mixtures of experts as targets: no drafter of any kind changes a token or a bit of a log-probability."""

import dataclasses
import functools

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.tensor_parallel.loading import LoadedModel
from tests.engine.prefixes import SPECS
from tests.engines import ids

FAMILIES = ("tiny-mixtral", "tiny-qwen2-moe", "tiny-qwen3-moe", "tiny-olmoe", "tiny-granite-moe", "tiny-gpt-oss")
# mtp has the layer of its own target, see tests/drafters/test_mtp.py
PROMPTS = [[3 + i, 9, 27, 81, 3 + i, 9, 27, 40 + i] for i in range(4)]


@functools.cache
def mixture(family):
    """The tiny model of a family, with heads that the drafters of these tests fit."""
    config = dataclasses.replace(PRESETS[family], head_dim=PRESETS["tiny-llama"].head_dim)
    target = load_transformer(RandomCheckpoint(config), "float32", torch.device("cpu"))
    return LoadedModel(family, "float32", target, None, frozenset())


@pytest.mark.quick(6)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("none", "mtp")])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_drafter_changes_a_token_or_a_logit_of_a_mixture(folders, family, name, temperature, batch):
    model = mixture(family)
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=5, logprobs=2)
    plain = Engine(model, drafter="none", max_batch_size=1).generate(PROMPTS[:batch], params)
    engine = Engine(model, drafter=SPECS[name].format(**folders), max_batch_size=batch)
    for _ in range(2):  # what it has learned by the second time changes nothing
        outputs = engine.generate(PROMPTS[:batch], params)
        assert ids(outputs) == ids(plain)
        assert [output.logprobs for output in outputs] == [output.logprobs for output in plain]


def test_the_drafts_of_these_engines_are_verified(folders):
    """The comparison above would hold as well if nothing were drafted."""
    model, params = mixture(FAMILIES[-1]), SamplingParams(max_new_tokens=24, trace=True)
    for name in SPECS.keys() - {"mtp"}:
        engine = Engine(model, drafter=SPECS[name].format(**folders))
        outputs = [output for _ in range(2) for output in engine.generate(PROMPTS, params)]
        widest = max(len(cycle.tokens) for output in outputs for cycle in output.trace)
        assert (widest > 1) == (name != "none"), name
