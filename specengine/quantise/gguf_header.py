"""Metadata of a GGUF file: the model's sizes and rotary settings, and the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specengine.models.config import ModelConfig, RopeConfig
from specengine.models.config_gguf import config_from_gguf
from specengine.models.gated_delta.gguf_config import delta_keys
from specengine.models.rope import attention_scale
from specengine.quantise.rope_divisors import divisors_of
from specengine.quantise.same_config import check_same
from specengine.quantise.source import Source
from specengine.tokenizer.folder_vocab import has_vocabulary
from specengine.tokenizer.gguf_vocab import NAME_KEYS
from specengine.tokenizer.to_gguf import gguf_metadata

# names of architectures that are others in GGUF files
_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}


def architecture_of(config: ModelConfig) -> str:
    """Returns the name of the architecture in a GGUF file."""
    return _ARCHITECTURES.get(config.architecture, config.architecture)


def model_metadata(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns GGUF keys, without general.architecture, that describe the model and its tokenizer.

    shapes: of the tensors to write, by GGUF name.
    Raises ValueError naming a field or a tokenizer that a GGUF file cannot hold.
    """
    config, arch = source.checkpoint.config, architecture_of(source.checkpoint.config)
    divisors = divisors_of(config.rope, config.rotated)
    rope = replace(config.rope, kind="default", factor=1.0) if config.rope.kind == "llama3" else config.rope
    values = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.rotated,
        **{f"rope.{key}": value for key, value in _rope_keys(rope).items()},
        **_expert_keys(config, source.checkpoint.source),
        **delta_keys(config),
    }
    if config.sliding_window:
        values["attention.sliding_window"] = config.sliding_window
    metadata = {f"{arch}.{key}": value for key, value in values.items()}
    written = config_from_gguf({"general.architecture": arch, **metadata}, shapes, divisors, source.checkpoint.source)
    check_same(config, written, source.checkpoint.source, "a GGUF file")
    return metadata | _tokenizer(source)


def _expert_keys(config: ModelConfig, source: str) -> dict[str, Any]:
    """Returns the keys of a mixture. No key says whether weights are normalised: llama.cpp decides by architecture.

    Raises ValueError for layers without experts, which llama.cpp does not read in these architectures.
    """
    moe = config.moe
    if moe is None:
        return {}
    if moe.dense_layers:
        first = min(moe.dense_layers)
        raise ValueError(
            f"{source}: a GGUF file of {config.architecture} has experts in every layer, and layer {first} has none"
        )
    keys = {"expert_count": moe.num_experts, "expert_used_count": moe.experts_per_token}
    if config.architecture in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe"):
        keys["expert_feed_forward_length"] = moe.intermediate_size
    if moe.shared_size:
        keys["expert_shared_feed_forward_length"] = moe.shared_size
    return keys


def _rope_keys(rope: RopeConfig) -> Mapping[str, Any]:
    keys: dict[str, Any] = {"freq_base": rope.theta}
    if rope.kind != "default":
        keys |= {"scaling.type": rope.kind, "scaling.factor": rope.factor}
    if rope.kind == "yarn":
        keys["scaling.original_context_length"] = rope.original_max_position
        keys |= {"scaling.yarn_beta_fast": rope.beta_fast, "scaling.yarn_beta_slow": rope.beta_slow}
        plain = RopeConfig(rope.theta, rope.kind, rope.factor, rope.original_max_position)
        if (factor := attention_scale(rope) / attention_scale(plain)) != 1:
            keys["scaling.attn_factor"] = factor
        if rope.extrapolation_factor != 1:
            keys["scaling.yarn_ext_factor"] = rope.extrapolation_factor
    return keys


def _tokenizer(source: Source) -> dict[str, Any]:
    checkpoint = source.checkpoint
    config = checkpoint.config
    if checkpoint.metadata is not None:
        metadata = checkpoint.metadata.items()
        return {key: value for key, value in metadata if key.startswith("tokenizer.") or key in NAME_KEYS}
    found: dict[str, Any] = {}
    if source.folder is not None and has_vocabulary(source.folder):
        found = gguf_metadata(source.folder, config.vocab_size, config.eos_token_ids)
    else:
        keys = ("eos", "eot", "eom")
        found = {f"tokenizer.ggml.{key}_token_id": end for key, end in zip(keys, config.eos_token_ids, strict=False)}
    if config.bos_token_id is not None:
        found.setdefault("tokenizer.ggml.bos_token_id", config.bos_token_id)
    return found
