"""What a checkpoint's configuration says of its quantised weights."""

import json

import pytest

from specengine.models.checkpoint import open_checkpoint
from specengine.models.presets import PRESETS
from specengine.models.quantised.settings import Scheme, Settings, read_settings
from tests.models.files import CONFIG_JSON, random_state, write_folder


def groups(*each):
    listed = {f"group_{i}": {"targets": targets, "weights": weights} for i, (targets, weights) in enumerate(each)}
    return Settings({"quant_method": "compressed-tensors", "config_groups": listed}, "config.json")


def test_names_come_before_regexes_and_regexes_before_classes():
    settings = groups(
        (["Linear"], {"num_bits": 4, "group_size": 128}),
        (["re:.*mlp.*"], {"num_bits": 8, "group_size": -1}),
        (["model.layers.0.mlp.up_proj"], {"num_bits": 3, "symmetric": False}),
        (["Embedding"], {"num_bits": 6}),
    )
    assert settings.scheme("model.layers.0.mlp.up_proj") == Scheme(3, None, None, False)
    assert settings.scheme("model.layers.1.mlp.up_proj") == Scheme(8, -1)
    assert settings.scheme("model.layers.1.self_attn.q_proj") == Scheme(4, 128)
    assert settings.scheme("model.embed_tokens").bits == 6
    assert [each.bits for each in settings.schemes("lm_head")] == [4, 8, 3, 6]


@pytest.mark.parametrize("block", [[64, 32], "64x32"])
def test_block_structures_are_lists_or_texts(block):
    settings = groups((["Linear"], {"num_bits": 8, "type": "float", "block_structure": block}))
    assert settings.scheme("lm_head").block == (64, 32)


def test_presets_name_their_bits():
    data = {"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}
    assert Settings(data, "config.json").scheme("lm_head").bits == 4


def test_autoround_layers_change_what_they_name():
    extra = {"lm_head": {"bits": 8}, ".*k_proj.*": {"group_size": 32}}
    data = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "extra_config": extra}
    settings = Settings(data, "config.json")
    assert settings.scheme("lm_head") == Scheme(8, 128)
    assert settings.scheme("model.layers.0.self_attn.k_proj") == Scheme(4, 32)
    assert settings.scheme("model.layers.0.self_attn.q_proj") == Scheme(4, 128)


@pytest.mark.parametrize(
    "quantization, named",
    [
        ({"quant_method": "exl3", "bits": 4.0}, "'quant_method' is 'exl3', which is not supported; supported are FP8"),
        ({"quant_method": "quark"}, "'quant_method' is 'quark'"),
        ({"quant_method": 3}, "'quant_method' must be of type str"),
        ({"group_size": 64, "bits": 4}, "'quant_method' is missing, as in files of MLX and EXL2"),
        ([1], "expected an object of fields"),
        ({"quant_method": "gptq", "bits": "4"}, "'bits' must be of type int"),
        ({"quant_method": "gptq", "dynamic": {"+:(": {"bits": 8}}}, r"regex '\(' cannot be read"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"'weight_block_size' must be \[rows, columns\]"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": 3}}, "expected an object of fields"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": [1], "weights": {}}}}, "targets"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": ["re:a{99999999999}"]}}, "regex"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'format' is 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R": {}}}}, "transform_config"),
    ],
)
def test_configurations_that_cannot_be_honoured_are_refused_by_name(quantization, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(ValueError, match=named) as caught:
        read_settings(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json")


def test_a_folder_may_say_nothing_and_a_file_of_mlx_is_refused(tmp_path):
    assert read_settings(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": None}))
    assert read_settings(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"bits": 4, "group_size": 64}}))
    with pytest.raises(ValueError, match="'quantization' is of MLX"):
        read_settings(tmp_path)


def test_quantised_weights_in_a_pickle_are_refused(tmp_path):
    write_folder(tmp_path, random_state(PRESETS["tiny-llama"]), "bin")
    open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG_JSON, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match=r"quantised weights must be in model\.safetensors, not in pytorch_model\.bin"):
        open_checkpoint(tmp_path)
