"""GGUF files of mixtures of experts, as converters write them."""

from dataclasses import replace

import gguf
import torch

from tests.models.files import permuted, write_gguf

NAMES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}  # others have one name


def write_moe_gguf(path, config, state, kind="F32"):
    """Writes a GGUF file as converters do: a tensor for each part of all experts of a layer."""
    arch, moe = NAMES.get(config.architecture, config.architecture), config.moe
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_ids[0])
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.experts_per_token)
    if arch == "granitemoe":
        writer.add_embedding_scale(config.multipliers.embedding)
        writer.add_attention_scale(config.multipliers.attention)
        writer.add_residual_scale(config.multipliers.residual)
        writer.add_logit_scale(config.multipliers.logits_divisor)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_layers)
    interleaved = arch in ("llama", "granitemoe")
    merged: dict[str, list[torch.Tensor]] = {}
    for name, value in state.items():
        stored = permuted(name, value, replace(config, architecture="llama" if interleaved else "qwen3"))
        if ".experts." in name:
            layer, part = name.split(".")[2], name.split(".")[-2].removesuffix("_proj")
            merged.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(stored)
            continue
        if "shared_expert_gate" in name:
            stored = stored[0]
        name = name.replace("mlp.gate.", "block_sparse_moe.gate.") if arch == "llama" else name
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored.numpy())
    for name, matrices in merged.items():
        data, raw = torch.stack(matrices).numpy(), gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data if kind == "F32" else gguf.quants.quantize(data, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gpt_oss_gguf(path, config, state, kind=None, changes=()):
    """Writes a GGUF file as converters do: gate and up apart, rows as they are used. kind: of experts' matrices."""
    merged, rest, extra = {}, {}, []
    for name, value in state.items():
        layer, part = name.split(".")[2:3], name.split(".")[-2:]
        if ".experts." in name:
            merged.setdefault(f"blk.{layer[0]}.ffn_{part[0].removesuffix('_proj')}_exps.{part[1]}", []).append(value)
        elif name.endswith("sinks"):
            extra.append((f"blk.{layer[0]}.attn_sinks.weight", value))
        else:
            rest[name] = value
    for name, values in merged.items():
        value = torch.stack(values)
        if kind and name.endswith("weight"):
            value = (
                gguf.quants.quantize(value.numpy(), gguf.GGMLQuantizationType[kind]),
                gguf.GGMLQuantizationType[kind],
            )
        extra.append((name, value))
    number, real, text = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING
    values = {
        "attention.value_length": (config.head_dim, number),
        "attention.sliding_window": (config.sliding_window, number),
        "expert_count": (config.moe.num_experts, number),
        "expert_used_count": (config.moe.experts_per_token, number),
        "expert_feed_forward_length": (config.moe.intermediate_size, number),
        "rope.scaling.type": ("yarn", text),
        "rope.scaling.factor": (config.rope.factor, real),
        "rope.scaling.original_context_length": (config.rope.original_max_position, number),
        **dict(changes),
    }
    metadata = [(f"gpt-oss.{key}", *value) for key, value in values.items()]
    return write_gguf(path, config, rest, metadata, extra)
