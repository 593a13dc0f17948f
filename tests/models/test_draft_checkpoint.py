"""Checkpoints of drafters: reading, int8 storage, and the faults that are refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from specengine.models.config import RopeConfig
from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.models.weights import WeightLoader
from specengine.ops import native, reference
from specengine.ops.weight import gather_rows

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def write(folder, state, config=None, kind="model.safetensors"):
    folder.mkdir(exist_ok=True)
    if kind.endswith(".safetensors"):
        save_file(state, folder / kind)
    else:
        torch.save(state, folder / kind)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def state_of(**more):
    torch.manual_seed(0)
    return {"fc.weight": torch.randn(64, 192), "d2t": torch.arange(32), "t2d": torch.arange(320) < 32, **more}


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
def test_tensors_and_configuration_are_those_of_the_folder(tmp_path, kind):
    checkpoint = open_draft_checkpoint(write(tmp_path / "draft", state_of(), CONFIG, kind))
    for name, tensor in state_of().items():
        assert checkpoint.read(name).equal(tensor)
    assert checkpoint.read_rows("fc.weight", 3, 9).equal(state_of()["fc.weight"][3:9])
    assert checkpoint.json == CONFIG
    assert open_draft_checkpoint(write(tmp_path / "bare", state_of(), None, kind)).json == {}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_theta": 500000.0}, RopeConfig(500000.0)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, RopeConfig(1e6)),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(2e4, "linear", 2.0)),
        ({"rope_scaling": None, "rope_theta": None}, RopeConfig(10000.0)),
    ],
)
def test_the_rotary_settings_are_the_drafters_own_in_every_spelling(tmp_path, fields, rope):
    assert open_draft_checkpoint(write(tmp_path, state_of(), CONFIG | fields)).layer_config().rope == rope


def test_layers_have_their_own_sizes_and_the_biases_there_are_tensors_of(tmp_path):
    plain = open_draft_checkpoint(write(tmp_path / "a", state_of(), CONFIG)).layer_config()
    assert (plain.head_dim, plain.num_layers, plain.max_position, plain.qkv_bias) == (16, 1, 256, False)
    more = state_of(**{"midlayer.self_attn.q_proj.bias": torch.zeros(128)})
    other = open_draft_checkpoint(write(tmp_path / "b", more, CONFIG | {"head_dim": 32})).layer_config(3)
    assert (other.head_dim, other.num_layers, other.qkv_bias, other.mlp_bias) == (32, 3, True, False)
    del (short := dict(CONFIG))["max_position_embeddings"], short["rms_norm_eps"], short["num_key_value_heads"]
    bare = open_draft_checkpoint(write(tmp_path / "c", state_of(), short)).layer_config()
    assert (bare.max_position, bare.rms_norm_eps, bare.num_kv_heads) == (2048, 1e-6, 4)


def test_fields_of_a_nested_configuration_count_as_its_own(tmp_path):
    nested = {"transformer_layer_config": CONFIG, "draft_vocab_size": 32, "hidden_size": None}
    checkpoint = open_draft_checkpoint(write(tmp_path, state_of(), nested))
    assert checkpoint.layer_config().hidden_size == 64 and checkpoint.json["draft_vocab_size"] == 32


def quantised(weight):
    scale = (weight.view(len(weight), -1, 32).abs().amax(-1) / 127).half()
    codes = (weight.view(len(weight), -1, 32) / scale.float()[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8).view_as(weight), scale


def test_int8_weights_are_read_as_floats_and_multiplied_with_their_codes_kept(tmp_path):
    weight = state_of()["fc.weight"]
    codes, scale = quantised(weight)
    stored = {"fc.weight": codes, "fc.weight_scale": scale}
    checkpoint = open_draft_checkpoint(write(tmp_path, stored, CONFIG))
    expected = (codes.view(64, 6, 32) * scale.float()[..., None]).view(64, 192)
    assert list(checkpoint.tensors) == ["fc.weight"]
    assert checkpoint.read("fc.weight").equal(expected) and checkpoint.read_rows("fc.weight", 5, 9).equal(expected[5:9])
    assert (expected - weight).abs().max() < 0.02
    loader = WeightLoader(checkpoint, "auto", CPU, native)
    layer, x = loader.linear("fc"), torch.randn(3, 192)
    assert loader.formats == {"q8"}
    rows = torch.empty(64, 192)
    gather_rows(layer.weights[0], torch.arange(64, dtype=torch.int32), rows)
    assert rows.equal(expected)
    floats = WeightLoader(checkpoint, "auto", CPU, reference).linear("fc")
    torch.testing.assert_close(reference.linear(x, floats), x @ expected.T)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"fc.weight": torch.zeros(4, 64, dtype=torch.int8)}, "needs columns in blocks of 32 and 'fc.weight_scale'"),
        (
            {"fc.weight": torch.zeros(4, 40, dtype=torch.int8), "fc.weight_scale": torch.zeros(4, 1).half()},
            "blocks of 32",
        ),
        ({"fc.weight": torch.zeros(4, 64), "fc.weight_scale": torch.zeros(4, 2).half()}, "belongs to no int8 weight"),
    ],
)
def test_int8_weights_without_fitting_scales_are_refused(tmp_path, state, message):
    with pytest.raises(ValueError, match=message):
        open_draft_checkpoint(write(tmp_path, state))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "field 'hidden_size' is missing"),
        ({"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
        ({"hidden_size": 66}, "multiple of num_attention_heads 4"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: field 'factor' is missing"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_kv_heads 3"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_field_named(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        open_draft_checkpoint(write(tmp_path, state_of(), CONFIG | fields)).layer_config()


def test_other_folders_and_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"drafter: .*holds none of model.safetensors"):
        open_draft_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"drafter: .*no such folder"):
        open_draft_checkpoint(tmp_path / "missing")
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"drafter: .*not an intact safetensors file"):
        open_draft_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="has shape"):
        open_draft_checkpoint(write(tmp_path / "a", state_of())).expect("fc.weight", 64, 128)
    with pytest.raises(ValueError, match=r"'norm.weight' is missing"):
        open_draft_checkpoint(write(tmp_path / "a", state_of())).expect("norm.weight", 64)
