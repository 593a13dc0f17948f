"""Writes quantised folders of hybrids, as several packers do, beside their values in float32."""

import json

import torch
from safetensors.torch import load_file, save_file

from specengine.models.checkpoint import open_checkpoint
from tests.models.hybrid_files import write_hybrid
from tests.models.quantised.packing import NAMES, awq, gptq, grouped, words
from tests.models.quantised.packing_fp8 import blocks

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MIXTURE = {"num_experts": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
MLPS = {
    "qwen3_5": {"intermediate_size": 192},
    **dict.fromkeys(("qwen3_5_moe", "qwen3_next"), MIXTURE),
}
# of linear_attn; in_proj_a and in_proj_b have fewer rows than AWQ and GPTQ can pack
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj_ba", "out_proj")


def pack_quantized(weight):
    """Tensors of compressed-tensors' W4A16 with zero points, and their values."""
    codes, zeros, scales, values = grouped(weight, 4, 32)
    tensors = {
        "weight_packed": words(codes, 4),
        "weight_scale": scales,
        "weight_zero_point": words(zeros.T.contiguous(), 4).T,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, values


W4A16 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
FORMATS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "int4"),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, "int4"),
    "compressed-tensors": (
        pack_quantized,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4A16}},
        },
        "int4",
    ),
    "fp8 blocks": (blocks(48, 128), {"quant_method": "fp8", "weight_block_size": [48, 128]}, "e4m3"),
}


def is_packed(name):
    return name.removesuffix(".weight").endswith((*NAMES, *PROJECTIONS)) and name.endswith(".weight")


def saved(path, state, first="model."):
    """first: what names begin with; files of text and vision have model.language_model."""
    save_file({name.replace("model.", first, 1): each.contiguous().clone() for name, each in state.items()}, path)


def write_packed(folder, family, form, first="model.", more=lambda config: {}, pack=None):
    """Writes a hybrid twice, packed and as its values in float32. Returns both folders, and transformers' model.

    more: other tensors, some of which are packed too.
    """
    own, quantization, _ = FORMATS[form]
    pack = pack or own
    model = write_hybrid(folder / "plain", family, **SIZES, **MLPS[family])
    plain = load_file(folder / "plain" / "model.safetensors") | more(open_checkpoint(folder / "plain").config)
    stored = dict(plain)
    torch.manual_seed(4)
    for name in filter(is_packed, plain):
        tensors, values = pack(stored.pop(name))
        stored |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in tensors.items()}
        plain[name] = values
    saved(folder / "plain" / "model.safetensors", plain)
    (folder / "packed").mkdir()
    saved(folder / "packed" / "model.safetensors", stored, first)
    config = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "packed" / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder / "packed", folder / "plain", type(model).from_pretrained(folder / "plain")
