"""Writes GGUF files of random weights as llama.cpp's converter does."""

import re

import gguf
import torch

Type = gguf.GGMLQuantizationType
# architectures whose names in gguf are not their own in capitals
_GGUF_ARCHS = {
    "mixtral": "LLAMA",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_moe": "QWEN3MOE",
    "granitemoe": "GRANITE_MOE",
}


def permuted(name, tensor, config):
    """Interleaves the two rotary halves of each head of q and k, as the llama.cpp converter does."""
    interleaved = config.architecture in ("llama", "mixtral", "granitemoe")
    if not interleaved or not re.search(r"\.[qk]_proj\.", name):
        return tensor
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    halves = tensor.reshape(heads, 2, config.head_dim // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def gguf_arch(config):
    """Returns the number of a model's architecture in gguf."""
    return gguf.MODEL_ARCH[_GGUF_ARCHS.get(config.architecture, config.architecture.upper())]


def write_gguf(path, config, state, metadata=(), extra=()):
    """Writes the GGUF file of `state`: Hugging Face names to tensors or (bytes, block type).

    metadata: further keys, values and types.  extra: tensors under their names in the file.
    """
    arch = gguf_arch(config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_token_list([f"tok{index}é" for index in range(config.vocab_size)])
    writer.add_tokenizer_model("llama")
    writer.add_token_scores([-float(index) for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_ids[0])
    for key, value, type_ in metadata:
        writer.add_key_value(key, value, type_)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    stored = {names.get_name(name, (".weight", ".bias")): (name, value) for name, value in state.items()}
    stored |= {name: (name, value) for name, value in extra}
    for gguf_name, (name, value) in stored.items():
        if isinstance(value, tuple):
            writer.add_tensor(gguf_name, value[0], raw_dtype=value[1])
            continue
        value = permuted(name, value, config).contiguous()
        if value.dtype == torch.bfloat16:
            writer.add_tensor(gguf_name, value.view(torch.uint8).numpy(), raw_dtype=Type.BF16)
        else:
            writer.add_tensor(gguf_name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
