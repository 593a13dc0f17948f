"""Writes tiny hybrids with transformers, as folders of the Hugging Face layout."""

import gguf
import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
PARTS = ("gate", "up", "down")
FAMILIES = {
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {}),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, EXPERTS),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, EXPERTS),
}


def write_hybrid(folder, family, **changes):
    """Writes a random model of a family to a folder; returns it."""
    config_class, model_class, experts = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if not (experts and name == "intermediate_size")}
    model = model_class(config_class(**{**sizes, **experts, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # transformers initialises norms with their neutral value
            if "norm" in name or "dt_bias" in name:
                parameter.normal_(parameter.mean().item(), 0.2)
            elif parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return model


def tiled(tensor, dim, delta, size):
    """Puts value heads of `size` entries in the order of llama.cpp's converter: key heads vary fastest."""
    ratio = delta.num_value_heads // delta.num_key_heads
    heads = tensor.unflatten(dim, (delta.num_key_heads, ratio, size))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _header(path, config, kind, drafter_layers=0):
    """A writer with the keys of a hybrid."""
    delta, moe = config.gated_delta, config.moe
    arch = gguf.MODEL_ARCH_NAMES[kind]
    writer = gguf.GGUFWriter(path, arch)
    if moe is not None:
        writer.add_expert_count(moe.num_experts)
        writer.add_expert_used_count(moe.experts_per_token)
    writer.add_block_count(config.num_layers + drafter_layers)
    if drafter_layers:
        writer.add_uint32(f"{arch}.nextn_predict_layers", drafter_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size if moe is None else moe.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rotated)
    writer.add_array(f"{arch}.rope.dimension_sections", [2, 1, 1, 0])
    first = next(layer for layer in range(config.num_layers) if layer not in delta.layers)  # with attention
    writer.add_uint32(f"{arch}.full_attention_interval", first + 1)
    if delta.layers != {layer for layer in range(config.num_layers) if (layer + 1) % (first + 1)}:
        flags = [layer in delta.layers for layer in range(config.num_layers + drafter_layers)]
        writer.add_array(f"{arch}.attention.recurrent_layers", flags)
    writer.add_uint32(f"{arch}.ssm.conv_kernel", 4)
    writer.add_uint32(f"{arch}.ssm.state_size", delta.key_head_dim)
    writer.add_uint32(f"{arch}.ssm.group_count", delta.num_key_heads)
    writer.add_uint32(f"{arch}.ssm.time_step_rank", delta.num_value_heads)
    writer.add_uint32(f"{arch}.ssm.inner_size", delta.value_size)
    return writer


def write_hybrid_gguf(path, checkpoint, extra=(), fused=False, drafter_alone=False):
    """Writes a Qwen3.5 as llama.cpp's converter does. checkpoint: grouped heads.

    extra: names and tensors of the blocks behind the last; a third entry is the GGUF type to quantise to.
    fused: gate and up of all experts lie in one tensor.  drafter_alone: without the layers of the text model.
    """
    config, delta, moe = checkpoint.config, checkpoint.config.gated_delta, checkpoint.config.moe
    kind = gguf.MODEL_ARCH.QWEN35 if moe is None else gguf.MODEL_ARCH.QWEN35MOE
    writer = _header(path, config, kind, len({name.split(".")[1] for name, *_ in extra}))
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    for layer in range(config.num_layers if moe and not drafter_alone else 0):
        own = [f"model.layers.{layer}.mlp.experts.{expert}" for expert in range(moe.num_experts)]
        parts = {
            part: torch.stack([checkpoint.read(f"{name}.{part}_proj.weight").float() for name in own]) for part in PARTS
        }
        if fused:
            parts = {"gate_up": torch.cat([parts["gate"], parts["up"]], 1), "down": parts["down"]}
        for part, value in parts.items():
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", value.contiguous().numpy())
    first = "model.layers." if drafter_alone else "none"
    for name in (name for name in checkpoint.tensors if ".experts." not in name and not name.startswith(first)):
        value, own = checkpoint.read(name).float(), name.replace("decay", "A_log").replace("dt_bias", "dt_proj.bias")
        part, size = name.rpartition("linear_attn.")[2], delta.value_head_dim
        if part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "decay", "dt_bias"):
            value = tiled(value, 0, delta, size if "z" in part else 1)
        elif part in ("in_proj_qkv.weight", "conv1d.weight"):
            keys, values = value.split((2 * delta.key_size, delta.value_size))
            value = torch.cat((keys, tiled(values, 0, delta, size))).squeeze(1)
        elif name.endswith("shared_expert_gate.weight"):
            value = value[0]
        elif part == "out_proj.weight":
            value = tiled(value, 1, delta, size)
        writer.add_tensor(names.get_name(own, (".weight", ".bias")), value.contiguous().numpy())
    for name, value, *kind in extra:
        _add(writer, name, value, *kind)
    return _close(writer, path)


def _add(writer, name, value, kind=None):
    value = value.contiguous().numpy()
    writer.add_tensor(name, value if kind is None else gguf.quants.quantize(value, kind), raw_dtype=kind)


def _close(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_next_gguf(path, config, state, kind=None, joined=False):
    """Writes a Qwen3-Next as llama.cpp's converter does. state: of transformers.  kind: the GGUF type of its matrices.

    joined: q, k, v and z lie in one tensor, as in the first files of this architecture.
    """
    delta, arch = config.gated_delta, gguf.MODEL_ARCH.QWEN3NEXT
    writer, names = _header(path, config, arch), gguf.get_tensor_name_map(arch, config.num_layers)
    sizes = [delta.key_head_dim] * 2 + [delta.value_size // delta.num_key_heads] * 2
    for name, value in state.items():
        base = name.rpartition(".")[0]
        if name.endswith(".A_log"):
            value = -value.exp()
        elif name.endswith(".dt_bias"):
            name = f"{base}.dt_proj.bias"
        elif "conv1d" in name:
            value = value.squeeze()
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            value = value + 1
        if ".in_proj_qkvz." in name and not joined:
            q, k, v, z = value.view(delta.num_key_heads, sum(sizes), -1).split(sizes, 1)
            block = f"blk.{base.split('.')[2]}"
            _add(writer, f"{block}.attn_qkv.weight", torch.cat([each.flatten(0, 1) for each in (q, k, v)]), kind)
            _add(writer, f"{block}.attn_gate.weight", z.flatten(0, 1), kind)
            continue
        if ".experts." in name:
            parts = {"up": value[:, value.shape[1] // 2 :], "gate": value[:, : value.shape[1] // 2]}
            for part, rows in (parts if "gate_up" in name else {"down": value}).items():
                _add(writer, f"blk.{base.split('.')[2]}.ffn_{part}_exps.weight", rows, kind)
            continue
        value = value[0] if "shared_expert_gate" in name else value
        floats = value.ndim == 1 or name.endswith((".mlp.gate.weight", "conv1d.weight"))
        _add(writer, names.get_name(name, (".weight", ".bias")), value, None if floats else kind)
    return _close(writer, path)
