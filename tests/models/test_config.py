"""Configurations read from config.json dicts, checkpoint folders and GGUF metadata."""

import dataclasses
import json

import pytest

from specengine.models.config import ModelConfig, RopeConfig
from specengine.models.config_gguf import config_from_gguf
from specengine.models.config_hf import config_from_hf, read_model_config
from specengine.models.presets import PRESETS
from tests.models.files import CONFIG_JSON

LLAMA = CONFIG_JSON | {
    "model_type": "llama",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 160,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
SHAPES = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}


def hf(**changes):
    return config_from_hf({**LLAMA, **changes})


def qwen(version, **changes):
    return hf(architectures=[f"Qwen{version}ForCausalLM"], model_type=f"qwen{version}", **changes)


def mistral(**changes):
    return hf(architectures=["MistralForCausalLM"], model_type="mistral", **changes)


def gguf(**changes):
    metadata = {**GGUF, **{key.replace("__", "."): value for key, value in changes.items()}}
    return config_from_gguf(metadata, SHAPES)


def test_a_llama_config_maps_every_field():
    assert hf() == ModelConfig(
        architecture="llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position=512,
        rope=RopeConfig(10000.0),
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="bfloat16",
    )


def test_a_configuration_rejects_unknown_fields():
    with pytest.raises(TypeError, match="colour"):
        dataclasses.replace(hf(), colour=1)


def test_llama1_without_key_value_heads_uses_one_per_query_head():
    config = dict(LLAMA)
    del config["num_key_value_heads"]
    assert config_from_hf(config).num_kv_heads == 4
    assert hf(num_key_value_heads=None).num_kv_heads == 4


def test_an_explicit_head_dim_need_not_divide_the_hidden_size():
    assert hf(head_dim=24).head_dim == 24
    assert qwen(3, head_dim=32).head_dim == 32
    assert hf(head_dim=None).head_dim == 16


def test_biases_follow_the_family():
    assert (hf().qkv_bias, hf().output_bias, hf().mlp_bias) == (False, False, False)
    biased = hf(attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    assert (qwen(2).qkv_bias, qwen(2).output_bias, qwen(2).qk_norm) == (True, False, False)
    assert (qwen(3).qkv_bias, qwen(3).output_bias, qwen(3).qk_norm) == (False, False, True)


@pytest.mark.parametrize("dtype", [{"dtype": "float16"}, {"torch_dtype": "torch.float16"}, {"dtype": None}])
def test_both_spellings_of_the_dtype_are_read(dtype):
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert config_from_hf({**config, **dtype}).dtype == (None if dtype == {"dtype": None} else "float16")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 500000},
        {"rope_theta": 5e5, "rope_parameters": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None},
    ],
)
def test_both_spellings_of_the_rope_base_are_read(fields):
    assert hf(**fields).rope == RopeConfig(5e5)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4}, RopeConfig(kind="linear", factor=4.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, RopeConfig(kind="dynamic", factor=2.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            RopeConfig(kind="llama3", factor=8.0, original_max_position=64),
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "finetuned": True},
            RopeConfig(kind="yarn", factor=4.0, original_max_position=128),
        ),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.7,
                "mscale_all_dim": 0.5,
                "attention_factor": 1.1,
                "truncate": False,
            },
            RopeConfig(10000.0, "yarn", 4.0, 512, 1.0, 4.0, 16.0, 2.0, 0.7, 0.5, 1.1, False),
        ),
        ({"type": "yarn", "original_max_position_embeddings": 128}, RopeConfig(10000.0, "yarn", 4.0, 128)),
    ],
)
def test_every_rope_scaling_is_read_under_both_names(scaling, expected):
    assert hf(rope_scaling=scaling).rope == expected
    assert hf(rope_parameters={**scaling, "rope_theta": 1e6}).rope == dataclasses.replace(expected, theta=1e6)


def test_mistral_slides_on_all_layers_unless_the_window_is_null():
    assert mistral(sliding_window=64).layer_window(1) == 64
    assert mistral(sliding_window=64).sliding_layers == (True, True)
    assert mistral(sliding_window=None).layer_window(0) is None
    assert mistral(sliding_window=None).sliding_layers == ()


@pytest.mark.parametrize("version", [2, 3])
def test_qwen_slides_only_when_asked_and_from_max_window_layers_on(version):
    assert qwen(version, sliding_window=64).sliding_window is None
    some = qwen(version, sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert (some.layer_window(0), some.layer_window(1)) == (None, 64)
    none = qwen(version, sliding_window=64, use_sliding_window=True, max_window_layers=2)
    assert (none.sliding_window, none.sliding_layers) == (None, ())
    types = ["sliding_attention", "full_attention"]
    listed = qwen(version, sliding_window=64, use_sliding_window=True, layer_types=types)
    assert listed.sliding_layers == (True, False)
    with pytest.raises(ValueError, match="layer_types"):
        qwen(version, use_sliding_window=False, layer_types=types)


def test_llama_ignores_a_sliding_window_as_transformers_does():
    assert hf(sliding_window=64).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": None, "model_type": "gemma"}, "model_type"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": 63}, "hidden_size"),
        ({"hidden_size": -64, "head_dim": 16}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_theta": 0}, "theta"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000}}, "alpha"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(changes, field):
    with pytest.raises(ValueError, match=field) as caught:
        hf(**changes)
    assert str(caught.value).startswith("config.json")
    assert "\n" not in str(caught.value)


def test_an_absent_key_value_head_count_is_an_error_beyond_llama():
    config = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
    del config["num_key_value_heads"]
    with pytest.raises(ValueError, match="num_key_value_heads"):
        config_from_hf(config)


def test_the_folder_reader_merges_the_end_tokens_of_generation(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 7}))
    assert read_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7, 8]}')
    assert read_model_config(tmp_path).eos_token_ids == (7, 9, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_model_config(tmp_path).eos_token_ids == (7, 5)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_config_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_missing_config_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_transformers_saves_is_what_is_read(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    original = getattr(transformers, f"{family}Config")(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        architectures=[f"{family}ForCausalLM"],
        eos_token_id=[2, 3],
    )
    original.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config.architecture == family.lower()
    assert config.rope == RopeConfig(1e6, "linear", 2.0)
    assert config.head_dim == getattr(original, "head_dim", 16)
    assert config.rms_norm_eps == original.rms_norm_eps
    assert config.eos_token_ids == (2, 3)
    assert config.sliding_window == getattr(original, "sliding_window", None)


def test_gguf_metadata_maps_every_field():
    expected = dataclasses.replace(hf(), dtype=None)
    assert gguf() == expected
    assert gguf(tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=2).eos_token_ids == (2, 5)


def test_gguf_ties_embeddings_when_the_output_tensor_is_absent():
    assert not gguf().tie_embeddings
    assert config_from_gguf(GGUF, {"token_embd.weight": (320, 64)}).tie_embeddings


def test_gguf_reads_head_length_biases_and_norms():
    assert (
        gguf(
            llama__attention__key_length=32,
            llama__attention__value_length=32,
            llama__rope__dimension_count=32,
        ).head_dim
        == 32
    )
    metadata = {key.replace("llama", "qwen3"): value for key, value in GGUF.items()}
    qwen3 = config_from_gguf({**metadata, "general.architecture": "qwen3"}, SHAPES)
    assert qwen3.qk_norm and not qwen3.qkv_bias
    biased = config_from_gguf(GGUF, {**SHAPES, "blk.0.attn_q.bias": (64,), "blk.0.attn_output.bias": (64,)})
    assert biased.qkv_bias and biased.output_bias and not biased.mlp_bias


def test_gguf_rope_scaling_is_read():
    assert gguf(llama__rope__freq_base=5e5).rope == RopeConfig(5e5)
    assert gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=0.0).rope == RopeConfig()
    assert gguf(llama__rope__scale_linear=4.0).rope == RopeConfig(10000.0, "linear", 4.0, 512)
    yarn = gguf(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=128,
        llama__rope__scaling__yarn_beta_fast=16.0,
    )
    assert yarn.rope == RopeConfig(10000.0, "yarn", 4.0, 128, beta_fast=16.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attn_factor": 0.5}, {"attn_factor": 0.5}),
        ({"attn_factor": 1.5}, {"attn_factor": 1.5}),
        ({"yarn_attn_factor": 0.5}, {"attn_factor": 0.5}),
        ({"yarn_attn_factor": 0.5, "attn_factor": 0.5}, {"attn_factor": 0.5}),
        ({"yarn_ext_factor": 0.5}, {"extrapolation_factor": 0.5}),
        ({"yarn_ext_factor": -1.0}, {}),
        ({"yarn_attn_factor": 1.0}, "yarn_attn_factor' must be below 1, got 1.0; it may replace or multiply"),
        ({"yarn_attn_factor": 1.1386}, "yarn_attn_factor' must be below 1"),
        ({"yarn_attn_factor": 0.0}, "attn_factor must be positive"),
        ({"yarn_attn_factor": 0.5, "attn_factor": 0.25}, "scaling.attn_factor' contradicts .*yarn_attn_factor, 0.5"),
        ({"yarn_ext_factor": 0.0}, "yarn_ext_factor' must not be 0 with yarn scaling"),
        ({"type": "linear", "yarn_ext_factor": 0.5}, "yarn_ext_factor' must be 0 with linear scaling, got 0.5"),
        ({"type": "linear", "attn_factor": 0.5}, "scaling.attn_factor' is only supported with yarn, not with linear"),
        ({"type": "none", "yarn_attn_factor": 0.5}, "yarn_attn_factor' is only supported with yarn, not with none"),
        ({"type": "linear", "attn_factor": 1.0, "yarn_attn_factor": 1.0}, {"kind": "linear"}),
    ],
)
def test_gguf_factors_of_yarn_are_read_or_named(changes, expected):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128, **changes}
    keys = {f"llama__rope__scaling__{key}": value for key, value in scaling.items()}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            gguf(**keys)
    else:
        wanted = {"kind": "yarn", "factor": 4.0, "original_max_position": 128} | expected
        assert gguf(**keys).rope == RopeConfig(**wanted)


def test_factors_of_yarn_are_read_or_named():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    wanted = RopeConfig(10000.0, "yarn", 4.0, 128, attn_factor=0.5, extrapolation_factor=0.25)
    assert hf(rope_scaling={**scaling, "attn_factor": 0.5, "extrapolation_factor": 0.25}).rope == wanted
    assert hf(rope_parameters={**scaling, "attn_factor": 0.5, "extrapolation_factor": 0.25}).rope == wanted
    assert hf(rope_scaling={**scaling, "attn_factor": 1, "attention_factor": 1.1}).rope.attention_factor == 1.1
    for wrong, message in (
        ({"attn_factor": 0.5, "attention_factor": 1.1}, "attn_factor multiplies what attention_factor replaces"),
        ({"attn_factor": 0}, "attn_factor must be positive"),
        ({"extrapolation_factor": -1}, "extrapolation_factor must be 0 or positive"),
        ({"attn_factor": "1"}, "field 'attn_factor' must be of type float"),
    ):
        with pytest.raises(ValueError, match=message):
            hf(rope_scaling={**scaling, **wrong})


def test_gguf_rope_frequency_divisors_are_kept():
    assert config_from_gguf(GGUF, SHAPES, [1.0] * 8).rope.freq_divisors == (1.0,) * 8
    with pytest.raises(ValueError, match="freq_divisors"):
        config_from_gguf(GGUF, SHAPES, [1.0] * 7)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"general.architecture": "gemma"}, "general.architecture"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.feed_forward_length": [160, 80]}, "llama.feed_forward_length"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.expert_count": 8, "llama.expert_group_count": 4}, "llama.expert_group_count"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
            "llama.rope.scaling.yarn_log_multiplier",
        ),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads"),
    ],
)
def test_a_gguf_field_that_cannot_be_honoured_is_named(changes, field):
    with pytest.raises(ValueError, match=field):
        config_from_gguf({**GGUF, **changes}, SHAPES)


def test_presets_have_the_published_parameter_counts():
    from math import prod

    from specengine.models.checkpoint import expected_tensors

    counts = {name: sum(map(prod, expected_tensors(config).values())) for name, config in PRESETS.items()}
    assert counts["llama-3.1-8b"] == 8_030_261_248
    assert counts["llama-3.2-1b"] == 1_235_814_400
    assert counts["llama-2-7b"] == 6_738_415_616
    assert counts["vicuna-13b"] == 13_015_864_320
    assert counts["qwen3-8b"] == 8_190_735_360
    assert counts["qwen2.5-7b"] == 7_615_616_512
    assert all(count < 500_000 for name, count in counts.items() if name.startswith("tiny-"))
