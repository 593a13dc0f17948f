"""config.json of a folder, made from a ModelConfig where the source has none."""

from __future__ import annotations

from typing import Any

from specengine.models.config import ModelConfig, MoeConfig, RopeConfig
from specengine.models.config_hf import config_from_hf, hf_sizes
from specengine.models.rope import attention_scale
from specengine.quantise.rope_divisors import llama3_of
from specengine.quantise.same_config import check_same

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
}


def config_json(config: ModelConfig, source: str) -> dict[str, Any]:
    """Returns config.json of a model, without its dtype.

    Raises ValueError naming a field that config.json cannot say.
    """
    architecture = config.architecture
    if architecture == "llama" and config.sliding_window:
        architecture = "mistral"  # the same model with a window; GGUF has one name for both
    rope = _in_hf_spelling(config, source)
    ends = list(config.eos_token_ids)
    values: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        **hf_sizes(config),
        "max_position_embeddings": config.max_position,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
        "rope_scaling": _rope_scaling(rope),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    if config.moe is not None:
        values |= _expert_values(config.moe, architecture)
    if architecture in ("llama", "qwen3", "qwen3_moe", "olmoe"):
        values["attention_bias"] = config.output_bias
    if architecture == "qwen2_moe":
        values["qkv_bias"] = config.qkv_bias
    if architecture == "llama":
        values["mlp_bias"] = config.mlp_bias
    if architecture in ("mistral", "mixtral"):
        values["sliding_window"] = config.sliding_window
    check_same(config, config_from_hf(values, source), source, "config.json")
    return values


def _expert_values(moe: MoeConfig, architecture: str) -> dict[str, Any]:
    """Returns the fields of a family's experts: what models/experts/hf_config.py reads."""
    values: dict[str, Any] = {"num_experts_per_tok": moe.experts_per_token}
    if architecture == "mixtral":
        return values | {"num_local_experts": moe.num_experts}
    values |= {"num_experts": moe.num_experts, "norm_topk_prob": moe.renormalise}
    if architecture == "olmoe":
        return values
    values |= {"moe_intermediate_size": moe.intermediate_size, "decoder_sparse_step": 1}
    values["mlp_only_layers"] = sorted(moe.dense_layers)
    if architecture == "qwen2_moe":
        values["shared_expert_intermediate_size"] = moe.shared_size
    return values


def _in_hf_spelling(config: ModelConfig, source: str) -> RopeConfig:
    if not config.rope.freq_divisors:
        return config.rope
    found = llama3_of(config.rope, config.head_dim) if config.rope.kind == "default" else None
    if found is None:
        raise ValueError(f"{source}: config.json cannot say the divisors of rope_freqs.weight: they are not Llama 3's")
    return found


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    values = {key: getattr(rope, key) for key in _ROPE_KEYS[rope.kind]}
    if rope.attn_factor != 1:
        values["attention_factor"] = attention_scale(rope)  # transformers reads this key alone
    if rope.extrapolation_factor != 1:
        values["extrapolation_factor"] = rope.extrapolation_factor
    scaling = {"rope_type": rope.kind, **{key: value for key, value in values.items() if value is not None}}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return scaling
