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


def of_group(format=None, **weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"format": format, "weights": weights}}}


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
        (
            {"quant_method": "compressed-tensors", "quantization_config": {}, "sparsity_config": {"format": "24"}},
            "sparsity_config: field 'format' is '24', expected dense",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "banana"}},
            "quantization_config: field 'format' is 'banana', expected dense or int-quantized",
        ),
        (of_group(format="banana"), "config_groups: g: field 'format' is 'banana'"),
        (of_group(strategy="zigzag"), "g: weights: field 'strategy' is 'zigzag', expected tensor or channel"),
        (of_group(type="log"), "g: weights: field 'type' is 'log', expected int or float"),
        ({"quant_method": "modelopt", "quant_algo": "BANANA"}, "'quant_algo' is 'BANANA', expected a name that begins"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'quant_algo' is 'W4A8_AWQ'"),
        (
            {"quant_method": "modelopt", "quantized_layers": {"lm_head": {"quant_algo": "X"}}},
            "quantized_layers: lm_head: field 'quant_algo' is 'X'",
        ),
        ({"quant_method": "fp8", "fmt": ""}, "'fmt' is '', expected e4m3 or e5m2"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "'fmt' is 'e3m4', expected e4m3 or e5m2"),
        ({"quant_method": "auto-round", "packing_format": "banana"}, "'packing_format' is 'banana', expected a name"),
        ({"quant_method": "auto-round", "backend": "ipex"}, "'backend' is 'ipex', expected a name with awq"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R": {}}}}, "transform_config"),
    ],
)
def test_configurations_that_cannot_be_honoured_are_refused_by_name(quantization, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(ValueError, match=named) as caught:
        read_settings(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json")


ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_pb_wo", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MXFP8", "INT8_SQ")


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "W4A8_MXFP4_FP8", "W8A8_SQ_PER_CHANNEL", "MIXED_PRECISION", None])
def test_the_algorithms_of_modelopt_are_known(algorithm):
    settings = Settings({"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16}, "config.json")
    assert settings.scheme("lm_head").group == (None if algorithm == "MIXED_PRECISION" else 16)


def test_a_nested_configuration_is_unwrapped():
    inner = {"format": "pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 64}}}}
    dense = {"format": "dense", "sparsity_structure": "2:4"}
    outer = {"quant_method": "compressed-tensors", "quantization_config": inner, "sparsity_config": dense}
    for data in (outer, {"quantization_config": {**inner, "quant_method": "compressed-tensors"}}):
        settings = Settings(data, "config.json")
        assert settings.method == "compressed-tensors" and settings.scheme("lm_head") == Scheme(4, 64)


def test_a_scheme_says_whether_a_target_fits_the_module_and_cuts_its_weight():
    settings = groups((["Linear"], {"num_bits": 8, "group_size": 64}), (["Embedding"], {"num_bits": 4}))
    assert settings.scheme("lm_head").divides(2, 128) and not settings.scheme("lm_head").divides(2, 64)
    assert [each.fits for each in settings.schemes("lm_head")] == [True, False]
    assert not settings.scheme_of_bytes("model.embed_tokens").divides(2, 128)
    assert Scheme(block=(128, 128)).divides(129, 1) and not Scheme(block=(128, 128)).divides(128, 128)


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
