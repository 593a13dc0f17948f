"""What the libraries of the formats make of what is written: compressed-tensors and transformers."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine.models.presets import PRESETS
from specengine.quantise.hf_config import config_json
from specengine.quantise.int4_groups import pack, quantise_rows
from specengine.quantise.quantise import quantise
from specengine.quantise.source import is_linear
from tests.models.files import random_state
from tests.quantise.mixtures import config_of, float_folder
from tests.quantise.written import gguf_values, written_values
from tests.selection import wide

CONFIG = replace(
    PRESETS["tiny-llama"], hidden_size=128, head_dim=64, num_heads=2, num_kv_heads=1, intermediate_size=192
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_json(CONFIG, "test")))
    save_file(random_state(CONFIG), tmp_path / "hf" / "model.safetensors")
    quantise(tmp_path / "hf", "int4-g128", tmp_path / "out")
    return tmp_path / "out"


def test_words_are_those_of_compressed_tensors():
    packing = pytest.importorskip("compressed_tensors.compressors")
    pack_to_int32 = packing.pack_quantized.helpers.pack_to_int32
    codes = torch.randint(-8, 8, (5, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    assert torch.equal(pack(codes), pack_to_int32(codes, 4))
    assert not torch.equal(pack(codes.flip(1)), pack_to_int32(codes, 4))


def test_transformers_reads_the_weights_of_both_group_sizes(folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state, stored = random_state(CONFIG), load_file(folder / "model.safetensors")
    tokens = torch.tensor([[1, 9, 33, 250, 4]])
    with torch.inference_mode():
        logits = model(tokens).logits
    plain = (
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder.parent / "hf"))
        .float()
        .eval()
    )
    values = {name: tensor.bfloat16().float() if tensor.ndim == 2 else tensor for name, tensor in state.items()}
    for name in filter(is_linear, state):
        group = state[name].shape[1] // stored[f"{name}_scale"].shape[1]
        words, scales = quantise_rows(state[name], group)
        codes = torch.stack([(words >> 4 * place & 15) - 8 for place in range(8)], -1).view(state[name].shape)
        values[name] = codes * scales.float().repeat_interleave(group, 1)
    plain.load_state_dict(values)
    with torch.inference_mode():
        expected = plain(tokens).logits
        plain.load_state_dict(state)
        unquantised = plain(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (unquantised - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", wide(("mixtral", "qwen2_moe", "qwen3_moe")))
def test_transformers_reads_the_experts_of_a_folder(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    config, out = config_of(family), tmp_path / "out"
    quantise(float_folder(tmp_path / "hf", config, random_state(config)), "int4-g128", out)
    written = written_values(out, "int4-g128", config)
    state = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    prefix = "model.layers.1.mlp"
    for part, sides in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for expert, matrix in enumerate(state[f"{prefix}.experts.{part}"]):
            expected = torch.cat([written[f"{prefix}.experts.{expert}.{side}.weight"] for side in sides])
            assert torch.equal(matrix, expected.bfloat16()), (expert, part)
    assert torch.equal(state[f"{prefix}.gate.weight"], written[f"{prefix}.gate.weight"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "sizes"),
    # sizes of published models, which transformers takes for every file of the family
    [("qwen3_moe", {"intermediate_size": 768}), ("qwen2_moe", {"intermediate_size": 1408, "shared_size": 5632})],
)
def test_transformers_reads_a_gguf_file_of_experts(tmp_path, family, sizes):
    transformers = pytest.importorskip("transformers")
    config = config_of(family)
    config = replace(config, moe=replace(config.moe, **sizes))
    quantise(float_folder(tmp_path / "hf", config, random_state(config)), "q8_0", tmp_path / "m.gguf")
    load = transformers.AutoModelForCausalLM.from_pretrained
    read = load(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    same = load(float_folder(tmp_path / "values", config, gguf_values(tmp_path / "m.gguf", config)))
    tokens = torch.tensor([[1, 9, 33, 250, 4, 17, 80]])
    with torch.inference_mode():
        logits, expected = read(tokens).logits, same(tokens).logits
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert expected.std() > 0.1
