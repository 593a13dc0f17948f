"""Rotary tables against transformers, kind by kind."""

import math
from dataclasses import replace

import pytest
import torch

from specengine.models.config import RopeConfig
from specengine.models.config_hf import config_from_hf
from specengine.models.presets import PRESETS
from specengine.models.rope import rope_tables, static_frequencies

MAX_POSITION = 128
SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large base": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn, all parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
    "yarn, factor from lengths": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": None,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


def both_configs(rope, head_dim=64):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        intermediate_size=32,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=dict(rope),
    )
    return theirs, config_from_hf({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})


def their_tables(config, length):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_those_of_transformers(name, head_dim):
    length = MAX_POSITION if name == "dynamic" else 4096
    theirs, ours = both_configs(SCALINGS[name], head_dim)
    expected = their_tables(theirs, length)
    tables = rope_tables(ours, length)
    for table, reference in zip(tables, expected, strict=True):
        assert table.dtype == torch.float32
        assert table.shape == (length, head_dim // 2)
        torch.testing.assert_close(table, reference, rtol=0, atol=1e-6)


def test_the_scalings_differ_from_each_other():
    tables = [rope_tables(both_configs(rope)[1], 600)[0] for rope in SCALINGS.values()]
    for index, table in enumerate(tables):
        assert all((table - other).abs().max() > 1e-3 for other in tables[:index])


def test_dynamic_rotates_a_position_as_if_it_were_the_last_one():
    theirs, ours = both_configs(SCALINGS["dynamic"])
    cos, sin = rope_tables(ours, 300)
    for position in (127, 128, 200, 299):
        their_cos, their_sin = their_tables(theirs, position + 1)
        torch.testing.assert_close(cos[position], their_cos[position], rtol=0, atol=1e-6)
        torch.testing.assert_close(sin[position], their_sin[position], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_a_longer_table_begins_with_the_shorter_one(kind):
    config = replace(PRESETS["tiny-llama"], rope=RopeConfig(kind=kind, factor=2.0), max_position=50)
    for short, long in zip(rope_tables(config, 70), rope_tables(config, 200), strict=True):
        assert torch.equal(short, long[:70])


def test_frequency_divisors_reproduce_llama3():
    scaled = PRESETS["tiny-llama3"]
    plain = RopeConfig(scaled.rope.theta)
    step = [torch.atan2(*(t[1] for t in reversed(rope_tables(c, 2)))) for c in (replace(scaled, rope=plain), scaled)]
    divisors = tuple((step[0] / step[1]).tolist())
    config = replace(scaled, rope=replace(plain, freq_divisors=divisors))
    for table, expected in zip(rope_tables(config, 100), rope_tables(scaled, 100), strict=True):
        torch.testing.assert_close(table, expected, rtol=0, atol=1e-4)
    assert max(divisors) == pytest.approx(8.0, rel=1e-3) and min(divisors) == pytest.approx(1.0, rel=1e-3)


def yarn(**changes):
    return {**SCALINGS["yarn"], **changes}


@pytest.mark.parametrize("changes", [{}, {"mscale": 0.7, "mscale_all_dim": 0.5}])
def test_attn_factor_multiplies_what_transformers_computes(changes):
    """vLLM's reading; transformers ignores the key, so it gets the product as attention_factor."""
    own = rope_tables(both_configs(yarn(**changes))[1], 1)[0][0, 0].item()
    expected = their_tables(both_configs(yarn(**changes, attention_factor=0.6 * own))[0], 600)
    theirs, ours = both_configs(yarn(**changes, attn_factor=0.6))
    for table, reference, ignored in zip(rope_tables(ours, 600), expected, their_tables(theirs, 600), strict=True):
        torch.testing.assert_close(table, reference, rtol=0, atol=1e-6)
        assert (table - ignored).abs().max() > 0.1


def test_the_attn_factor_of_deepseek_cancels_the_scale_of_yarn():
    ours = both_configs(yarn(factor=4.0, attn_factor=0.8782488562869419))[1]
    cos, sin = rope_tables(ours, 40)
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.ones_like(cos))


def test_extrapolation_factor_multiplies_the_share_of_unscaled_frequencies():
    """The published code of YaRN, and vLLM's: mask = (1 - ramp) * extrapolation_factor."""
    ours = both_configs(yarn(extrapolation_factor=0.25))[1]
    dim, rope = ours.head_dim, ours.rope
    powers = torch.tensor([rope.theta ** (2 * i / dim) for i in range(dim // 2)])
    bounds = [
        dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    ]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
    mask = (1 - ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)) * 0.25
    expected = 1 / (rope.factor * powers) * (1 - mask) + 1 / powers * mask
    torch.testing.assert_close(static_frequencies(rope, dim), expected)
    assert not torch.allclose(static_frequencies(replace(rope, extrapolation_factor=1.0), dim), expected)


def test_yarn_scales_both_tables_by_its_attention_factor():
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_position=32)
    cos, sin = rope_tables(replace(PRESETS["tiny-llama"], rope=rope), 40)
    norm = (cos**2 + sin**2).sqrt()
    torch.testing.assert_close(norm, torch.full_like(norm, 0.1 * math.log(4.0) + 1.0))
