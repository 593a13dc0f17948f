"""Granite's multipliers: where files say them, what is refused, and logits that are divided before any reader."""

from dataclasses import replace

import pytest
import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.config_gguf import config_from_gguf
from specengine.models.config_hf import config_from_hf
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.ops import native, reference
from specengine.quantise.quantise import quantise
from specengine.tensor_parallel.loading import load_model
from specengine.utils.multipliers import PLAIN, Multipliers
from tests.models.files import CONFIG_JSON

CPU = torch.device("cpu")
GRANITE = {**CONFIG_JSON, "architectures": ["GraniteForCausalLM"]}
FACTORS = {"embedding_multiplier": 12, "attention_multiplier": 0.0625, "residual_multiplier": 0.5, "logits_scaling": 8}
GGUF = {
    "general.architecture": "granite",
    "granite.block_count": 2,
    "granite.context_length": 512,
    "granite.embedding_length": 64,
    "granite.feed_forward_length": 160,
    "granite.attention.head_count": 4,
    "granite.attention.layer_norm_rms_epsilon": 1e-5,
    "granite.logit_scale": 8.0,
}
SHAPES = {"token_embd.weight": (320, 64)}


def test_multipliers_are_read_from_config_json():
    assert config_from_hf({**GRANITE, **FACTORS}).multipliers == Multipliers(12.0, 0.0625, 0.5, 8.0)
    assert config_from_hf(GRANITE).multipliers == Multipliers(1.0, 1.0, 1.0, 1.0)  # transformers' defaults
    assert config_from_hf({**CONFIG_JSON, **FACTORS}).multipliers == PLAIN  # LLaMA has none
    for name, value in (("residual_multiplier", 0), ("embedding_multiplier", -1), ("logits_scaling", 1e999)):
        with pytest.raises(ValueError, match=r"multipliers: \w+ must be positive and finite"):
            config_from_hf({**GRANITE, name: value})


def test_multipliers_are_read_from_gguf_keys():
    assert config_from_gguf(GGUF, SHAPES).multipliers == Multipliers(logits_divisor=8.0)
    keys = {"embedding_scale": 12.0, "attention.scale": 0.0625, "residual_scale": 0.5}
    said = {**GGUF, **{f"granite.{key}": value for key, value in keys.items()}}
    assert config_from_gguf(said, SHAPES).multipliers == Multipliers(12.0, 0.0625, 0.5, 8.0)
    with pytest.raises(ValueError, match=r"'granite.logit_scale' is missing"):
        config_from_gguf({key: value for key, value in GGUF.items() if key != "granite.logit_scale"}, SHAPES)
    with pytest.raises(ValueError, match=r"'granite.rope.scaling.finetuned' must be true"):
        config_from_gguf({**GGUF, "granite.rope.scaling.finetuned": False}, SHAPES)


def test_relatives_that_are_not_supported_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'architectures' must be one of .* got 'GraniteMoeHybridForCausalLM'"):
        config_from_hf({**GRANITE, "architectures": ["GraniteMoeHybridForCausalLM"]})
    olmoe = {**CONFIG_JSON, "architectures": ["OlmoeForCausalLM"]}
    assert config_from_hf(olmoe).whole_qk_norm
    with pytest.raises(ValueError, match="'clip_qkv' must be null"):
        config_from_hf({**olmoe, "clip_qkv": 8.0})


def test_what_multipliers_cannot_do_yet_is_refused_by_name(tmp_path, monkeypatch):
    dense = replace(PRESETS["tiny-granite-moe"], architecture="granite", moe=None)
    monkeypatch.setitem(PRESETS, "tiny-granite", dense)
    with pytest.raises(ValueError, match="tensor_parallel: expected 1 for granite, multipliers are not supported"):
        load_model("random:tiny-granite", device="cpu", tensor_parallel=2)
    for form, name in (("q8_0", "out.gguf"), ("int4-g128", "out")):
        with pytest.raises(ValueError, match="models of granite cannot be written yet"):
            quantise("random:tiny-granite", form, tmp_path / name)


def test_logits_are_divided_and_hidden_states_are_not():
    config = PRESETS["tiny-granite-moe"]
    whole = replace(config, multipliers=replace(config.multipliers, logits_divisor=1.0))
    found, expected = [], []
    for each, results in ((config, found), (whole, expected)):
        target = load_transformer(RandomCheckpoint(each), "float32", CPU)
        cache, rows = target.new_cache(), list(range(40))
        output = target.forward(TreeBatch.chains([rows], CPU), cache, cache.batch([cache.allocate(40)], [0]))
        likeliest = target.likeliest(output.hidden_states.last)
        assert torch.equal(likeliest, output.scores.argmax(-1).int())
        results += [output.hidden_states.last, output.scores, likeliest]
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(6 * found[1], expected[1])
    assert torch.equal(found[2], expected[2])


def test_the_decoder_of_a_device_applies_the_same_multipliers():
    checkpoint = RandomCheckpoint(replace(PRESETS["tiny-granite-moe"], architecture="granite", moe=None))
    results = []
    for ops in (native, reference):
        target = load_transformer(checkpoint, "float32", CPU, ops).with_hidden_state_layers((1, 2))
        cache = target.new_cache()
        place = cache.batch([cache.allocate(40)], [0])
        output = target.forward(TreeBatch.chains([list(range(40))], CPU), cache, place)
        results.append((output.scores, output.hidden_states.at_layers))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
