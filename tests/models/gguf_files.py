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


def rewrite_gguf(source, path, changes=(), renamed=lambda name: name, extra=(), kept=lambda name: True):
    """Writes a GGUF file again as another program would.

    changes: keys to values; a key that is new or has another type gets the type of its value, one of None goes.
    renamed: from the name of a tensor.  extra: names and tensors.  kept: whether a tensor is written.
    """
    reader = gguf.GGUFReader(source)
    values = {
        key: (field.contents(), field.types) for key, field in reader.fields.items() if not key.startswith("GGUF")
    }
    values |= {key: (value, ()) for key, value in dict(changes).items()}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture")[0])
    for key, (value, types) in values.items():
        if value is None:
            continue
        if types:
            writer.add_key_value(key, value, types[0], types[-1] if len(types) > 1 else None)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, _type_of(value))
    for tensor in reader.tensors:
        if kept(tensor.name):
            writer.add_tensor(renamed(tensor.name), tensor.data, raw_dtype=tensor.tensor_type)
    for name, value in extra:
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type_of(value):
    kinds = gguf.GGUFValueType
    return {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]


def split_gguf(source, folder, count):
    """Writes the parts of a file, as llama.cpp's program does: tensors in turn, the keys of the model in the first."""
    reader = gguf.GGUFReader(source)
    names = [tensor.name for tensor in reader.tensors]
    model_keys = {key: None for key in reader.fields if not key.startswith("GGUF") and key != "general.architecture"}
    paths = []
    for number in range(count):
        path = folder / f"{source.stem}-{number + 1:05}-of-{count:05}.gguf"
        keys = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        own = set(names[number::count])
        paths.append(rewrite_gguf(source, path, keys | (model_keys if number else {}), kept=own.__contains__))
    return paths
