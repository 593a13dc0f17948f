"""Writes block drafters as GGUF files of architecture `dflash`."""

import re

import gguf

from tests.drafters.block_files import BLOCK, DIM, HEADS, HIDDEN, INNER, KV_HEADS, MASK, VOCAB

NAMES = {  # in a folder -> in a file
    r"layers\.(\d+)\.input_layernorm": r"blk.\1.attn_norm",
    r"layers\.(\d+)\.post_attention_layernorm": r"blk.\1.ffn_norm",
    r"layers\.(\d+)\.self_attn\.([qkv])_proj": r"blk.\1.attn_\2",
    r"layers\.(\d+)\.self_attn\.o_proj": r"blk.\1.attn_output",
    r"layers\.(\d+)\.self_attn\.([qk])_norm": r"blk.\1.attn_\2_norm",
    r"layers\.(\d+)\.mlp\.(gate|up|down)_proj": r"blk.\1.ffn_\2",
    r"layers\.(\d+)\.attention_conv\.base_kernel": r"blk.\1.attn_conv_base",
    r"layers\.(\d+)\.attention_conv\.kernel_projection": r"blk.\1.attn_conv_proj",
    r"layers\.(\d+)\.mlp_conv\.base_kernel": r"blk.\1.ffn_conv_base",
    r"layers\.(\d+)\.mlp_conv\.kernel_projection": r"blk.\1.ffn_conv_proj",
    r"hidden_norm": "enc.output_norm",
    r"norm": "output_norm",
    r"markov_head\.(markov_w\d)": r"\1",
    r"confidence_head\.proj": "conf_proj",
    r"candidate_selector\.(predecessor|successor)_codebook": r"selector_\1.weight",
    r"candidate_selector\.hidden_projection": "selector_hidden",
    r"fc": "fc",
    r"lm_head": "output",
}
FACTS = {
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "block_count": 2,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": DIM,
    "context_length": 512,
    "vocab_size": VOCAB,
    "block_size": BLOCK,
}


def stored_name(name):
    stem, dot, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = name, "", ""
    for pattern, stored in NAMES.items():
        if re.fullmatch(pattern, stem):
            return f"{re.sub(pattern, stored, stem)}{dot}{suffix}"
    return name


def write_gguf(path, state, facts=(), arch="dflash", mask=MASK):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (FACTS | dict(facts)).items():
        adds = {bool: writer.add_bool, float: writer.add_float32, list: writer.add_array}
        add = adds.get(type(value), writer.add_uint32)
        add(f"dflash.{key}", value)
    writer.add_float32("dflash.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("dflash.rope.freq_base", 1000.0)
    writer.add_array("dflash.target_layers", [0, 1])
    writer.add_uint32("tokenizer.ggml.mask_token_id", mask)
    for name, tensor in state.items():
        writer.add_tensor(stored_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
