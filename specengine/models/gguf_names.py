"""Names and row order of LLaMA-shaped models in GGUF files, beside those of Hugging Face."""

from __future__ import annotations

import re

import numpy as np

from specengine.models.config import ModelConfig

_INTERLEAVED = ("llama", "mistral", "mixtral", "granite", "granitemoe")
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# of layers of gated delta rule
_DELTA_NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    # of Qwen3-Next: rows of b and a, and in older files of q, k, v and z, interleaved by key head as in folders
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
}
_DELTA_VECTORS = {"ssm_a": "linear_attn.decay", "ssm_dt.bias": "linear_attn.dt_bias"}
# of gpt-oss and hybrids, whose ffn_norm has another name; sinks have no suffix in folders
_POST_NORM_NAMES = {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"}
_OF_HF = {name: stem for stem, name in (_NAMES | _LAYER_NAMES | _DELTA_NAMES).items()}
_VECTORS_OF_HF = {name: stem for stem, name in _DELTA_VECTORS.items()}


def hf_name(name: str) -> str:
    """Returns the Hugging Face name of a GGUF tensor of a LLaMA-shaped model; an unknown name is unchanged."""
    stem, _, suffix = name.rpartition(".")
    expert = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)", stem)  # files of 2023
    if expert:
        return f"model.layers.{expert[1]}.mlp.experts.{expert[3]}.{expert[2]}_proj.{suffix}"
    if vector := re.fullmatch(r"blk\.(\d+)\.(ssm_a|ssm_dt\.bias)", name):
        return f"model.layers.{vector[1]}.{_DELTA_VECTORS[vector[2]]}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _DELTA_NAMES:
        return f"model.layers.{layer[1]}.{_DELTA_NAMES[layer[2]]}.{suffix}"
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"
    if layer and layer[2] in _POST_NORM_NAMES:
        return f"model.layers.{layer[1]}.{_POST_NORM_NAMES[layer[2]]}.{suffix}".replace(".sinks.weight", ".sinks")
    return f"{_NAMES[stem]}.{suffix}" if stem in _NAMES else name


def expert_names(name: str, experts: int) -> list[str]:
    """Lists the Hugging Face names of the matrices, or biases, in a GGUF tensor of all experts, in order; else none."""
    fused = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)", name)
    if fused is None:
        return []
    prefix, parts = f"model.layers.{fused[1]}.mlp.experts", fused[2].split("_")
    return [f"{prefix}.{expert}.{part}_proj.{fused[3]}" for expert in range(experts) for part in parts]


def gguf_name(name: str, config: ModelConfig) -> str:
    """Returns the GGUF name of a tensor of expected_tensors: the inverse of `hf_name` and of `expert_names`."""
    stem, _, suffix = name.rpartition(".")
    expert = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(\w+)_proj", stem)
    if expert:
        return f"blk.{expert[1]}.ffn_{expert[2]}_exps.{suffix}"
    vector = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if vector and vector[2] in _VECTORS_OF_HF:
        return f"blk.{vector[1]}.{_VECTORS_OF_HF[vector[2]]}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if layer and layer[2] == "post_attention_layernorm" and config.gated_delta is not None:
        return f"blk.{layer[1]}.post_attention_norm.{suffix}"
    return f"blk.{layer[1]}.{_OF_HF[layer[2]]}.{suffix}" if layer else f"{_OF_HF[stem]}.{suffix}"


def stored_rows(config: ModelConfig, name: str, start: int, stop: int) -> np.ndarray:
    """Returns the places in a GGUF file of rows [start, stop) of a tensor. name: of Hugging Face.

    Files of architecture llama, which mistral and mixtral share, and of granite interleave the two rotary halves of
    each head of q and k: row j of half h is stored as row 2 j + h.
    """
    rows = np.arange(start, stop)
    if config.architecture not in _INTERLEAVED or not re.search(r"\.[qk]_proj\.", name):
        return rows
    dim = config.head_dim
    head, inner = np.divmod(rows, dim)
    half, j = np.divmod(inner, dim // 2)
    return head * dim + 2 * j + half
