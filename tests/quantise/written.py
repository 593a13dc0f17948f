"""Where tests write quantised models, and the values of what was written by these tests' own arithmetic."""

import re

import gguf
import torch
from safetensors.torch import load_file

from specengine.models.checkpoint import expected_tensors
from specengine.quantise.source import is_linear
from tests.models.gguf_files import gguf_arch, permuted

# relative error of a random matrix: of a rounding to 16 steps between extremes, to 255, to 15, to 3 bits of mantissa
ERRORS = {"q4_1": (0.05, 0.11), "q8_0": (0.001, 0.01), "int4-g128": (0.05, 0.12), "fp8-block": (0.01, 0.04)}
# Mixtral's names of parts, by those of the other families
_MIXTRAL = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def place(tmp_path, to):
    return tmp_path / ("out.gguf" if to in ("q4_1", "q8_0") else "out")


def written_values(out, to, config):
    """The written tensors by Hugging Face name, float32."""
    if out.is_file():
        return gguf_values(out, config)
    tensors = load_file(out / "model.safetensors")
    return {name: value_of(tensors, name, to, config) for name in expected_tensors(config)}


def gguf_values(path, config):
    names = gguf.get_tensor_name_map(gguf_arch(config), config.num_layers)
    stored = {}
    for name in expected_tensors(config):
        whole = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        stored.setdefault(names.get_name(whole, (".weight", ".bias")), []).append(name)
    values = {}
    for tensor in gguf.GGUFReader(path).tensors:
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        of_one = stored[tensor.name]
        if "shared_expert_gate" in of_one[0]:
            assert value.ndim == 1
            value = value[None]
        parts = value if value.ndim == 3 else [value]
        for name, part in zip(of_one, parts, strict=True):
            order = permuted(name, torch.arange(part.shape[0])[:, None], config).ravel()
            values[name] = torch.empty_like(part)
            values[name][order] = part
    return values


def folder_name(name, config):
    """The name of a tensor in files of its family."""
    if config.architecture == "mixtral" and ".mlp." in name:
        for ours, theirs in _MIXTRAL.items():
            name = name.replace(ours, theirs)
    return name


def value_of(tensors, name, to, config):
    stored = folder_name(name, config)
    if not is_linear(name):
        return tensors[stored].float()
    stem = stored.removesuffix(".weight")
    if to == "fp8-block":
        scale = tensors[f"{stem}.weight_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        value = tensors[stored].float()
        return value * scale[: value.shape[0], : value.shape[1]]
    words, scale = tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"].float()
    shape = tensors[f"{stem}.weight_shape"].tolist()
    codes = torch.stack([(words >> 4 * place & 15) - 8 for place in range(8)], -1).reshape(shape)
    return codes * scale.repeat_interleave(shape[1] // scale.shape[1], 1)
