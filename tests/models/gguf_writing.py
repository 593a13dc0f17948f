"""Writes a state dict of Hugging Face names as the GGUF file that the llama.cpp converter would make of it."""

import re

import gguf
import numpy as np
import torch

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_gguf(path, config, state, quantise=None, metadata=None, extra=None):
    """`quantise` maps a Hugging Face name to a type name or None (keep the float type); `extra` adds raw tensors."""
    arch = {"mistral": "llama"}.get(config.architecture, config.architecture)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"tok{index}é" for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_ids[0])
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, *value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_layers)
    for name, tensor in state.items():
        heads = config.num_heads if "q_proj" in name else config.num_kv_heads
        if arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            halves = tensor.reshape(heads, 2, config.head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        kind = (quantise(name) if quantise else None) or _FLOATS[tensor.dtype]
        qtype = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(tensor.float().numpy(), qtype)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(data), raw_dtype=qtype)
    for name, (data, qtype) in (extra or {}).items():
        writer.add_tensor(name, data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
