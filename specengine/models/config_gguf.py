"""Model configuration from the metadata and tensor shapes of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specengine.models.config import ModelConfig, RopeConfig, check_layers
from specengine.utils.json_fields import Fields


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_freqs: Sequence[float] = (),
    where: str = "GGUF metadata",
) -> ModelConfig:
    """Maps GGUF metadata and tensor shapes (outermost dimension first, GGUF names) to a configuration.

    rope_freqs: values of the tensor rope_freqs.weight, [head_dim / 2], where the file has it.
    Raises ValueError naming the wrong field.
    """
    fields = Fields(metadata, where)
    arch = fields.get("general.architecture", str)
    if arch not in ("llama", "qwen2", "qwen3"):
        raise fields.error("general.architecture", f"must be llama, qwen2 or qwen3, got {arch!r}")
    if metadata.get(f"{arch}.expert_count"):
        raise fields.error(f"{arch}.expert_count", "describes a mixture of experts, which is not supported")
    hidden_size = fields.get(f"{arch}.embedding_length", int)
    num_heads = fields.get(f"{arch}.attention.head_count", int)
    head_dim = fields.get(f"{arch}.attention.key_length", int, hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(f"{arch}.{key}", int, head_dim) != head_dim:
            raise fields.error(f"{arch}.{key}", f"must equal the head dimension {head_dim}")
    window = fields.get(f"{arch}.attention.sliding_window", int, 0) or None
    if window and arch != "llama":
        raise fields.error(f"{arch}.attention.sliding_window", "is only supported for architecture llama")
    num_layers = fields.build(check_layers, num_layers=fields.get(f"{arch}.block_count", int))
    max_position = fields.get(f"{arch}.context_length", int)
    embedding = shapes.get("token_embd.weight", (0,))
    # end of turn and end of message also end a generation
    eos = [fields.get(f"tokenizer.ggml.{kind}_token_id", int, None) for kind in ("eos", "eot", "eom")]
    return fields.build(
        ModelConfig,
        architecture=arch,
        vocab_size=fields.get(f"{arch}.vocab_size", int, embedding[0]),
        hidden_size=hidden_size,
        intermediate_size=fields.get(f"{arch}.feed_forward_length", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get(f"{arch}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        max_position=max_position,
        rope=_gguf_rope(fields, arch, max_position, tuple(rope_freqs)),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=arch == "qwen3",
        sliding_window=window,
        sliding_layers=(True,) * num_layers if window else (),
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id", int, None),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
    )


def _gguf_rope(fields: Fields, arch: str, max_position: int, freq_divisors: tuple[float, ...]) -> RopeConfig:
    prefix = f"{arch}.rope."
    theta = fields.get(prefix + "freq_base", float, RopeConfig.theta)
    factor = fields.get(prefix + "scaling.factor", float, fields.get(prefix + "scale_linear", float, 0.0))
    # converters store factor 0 or 1 for "none", and omit the type for the old linear scaling
    kind = fields.get(prefix + "scaling.type", str, "linear")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return fields.build(RopeConfig, theta=theta, freq_divisors=freq_divisors)
    if kind not in ("linear", "yarn"):
        raise fields.error(prefix + "scaling.type", f"must be none, linear or yarn, got {kind!r}")
    for key, neutral in (("attn_factor", 1.0), ("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if fields.get(f"{prefix}scaling.{key}", float, neutral) != neutral:
            raise fields.error(f"{prefix}scaling.{key}", f"is only supported with the value {neutral}")
    if kind == "yarn" and fields.data.get(prefix + "scaling.yarn_attn_factor") is not None:
        # ambiguous: converters store an absolute factor, llama.cpp multiplies by it
        raise fields.error(prefix + "scaling.yarn_attn_factor", "is ambiguous and not supported")
    if factor == 0.0:
        raise fields.error(prefix + "scaling.factor", "is missing")
    return fields.build(
        RopeConfig,
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=fields.get(prefix + "scaling.original_context_length", int, max_position),
        beta_fast=fields.get(prefix + "scaling.yarn_beta_fast", float, RopeConfig.beta_fast),
        beta_slow=fields.get(prefix + "scaling.yarn_beta_slow", float, RopeConfig.beta_slow),
        freq_divisors=freq_divisors,
    )
