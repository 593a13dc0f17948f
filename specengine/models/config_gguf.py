"""Model configuration from the metadata and tensor shapes of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specengine.models.config import ModelConfig, MoeConfig, RopeConfig, check_layers
from specengine.models.gated_delta.gguf_config import gguf_gated_delta, gguf_rotary_dim
from specengine.models.gguf_fields import GGUFFields
from specengine.utils.multipliers import PLAIN, Multipliers

# general.architecture -> that of ModelConfig
_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "olmoe": "olmoe",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
    "qwen3next": "qwen3_next",
}
_HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
# architectures that have no dense models
_WITH_EXPERTS = (
    "qwen2moe",
    "qwen3moe",
    "olmoe",
    "granitemoe",
    "gpt-oss",
    "qwen35moe",
    "qwen3next",
)
_GPT_OSS_GATE = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # OpenAI's values, which these files do not repeat


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
    fields = GGUFFields(metadata, where)
    arch = fields.get("general.architecture", str)
    if arch not in _ARCHITECTURES:
        raise fields.error("general.architecture", f"must be one of {', '.join(_ARCHITECTURES)}, got {arch!r}")
    hidden_size = fields.get(f"{arch}.embedding_length", int)
    num_heads = fields.get(f"{arch}.attention.head_count", int)
    head_dim = fields.get(f"{arch}.attention.key_length", int, hidden_size // max(num_heads, 1))
    hybrid = arch in _HYBRIDS
    for key in ("attention.value_length",) if hybrid else ("attention.value_length", "rope.dimension_count"):
        if fields.get(f"{arch}.{key}", int, head_dim) != head_dim:
            raise fields.error(f"{arch}.{key}", f"must equal the head dimension {head_dim}")
    window = fields.get(f"{arch}.attention.sliding_window", int, 0) or None
    if window and arch not in ("llama", "gpt-oss"):
        raise fields.error(f"{arch}.attention.sliding_window", "is only supported for architectures llama and gpt-oss")
    if arch == "gpt-oss" and not window:
        raise fields.error(f"{arch}.attention.sliding_window", "is missing")
    num_layers = fields.build(check_layers, num_layers=_blocks(fields, arch))
    max_position = fields.get(f"{arch}.context_length", int)
    moe = _gguf_moe(fields, arch, shapes, num_layers)
    embedding = shapes.get("token_embd.weight", (0,))
    # end of turn and end of message also end a generation; Ollama's files have a list besides
    eos = [fields.get(f"tokenizer.ggml.{kind}_token_id", int, None) for kind in ("eos", "eot", "eom")]
    eos += fields.ids("tokenizer.ggml.eos_token_ids")
    return fields.build(
        ModelConfig,
        architecture="mixtral" if moe and arch == "llama" else _ARCHITECTURES[arch],
        vocab_size=fields.get(f"{arch}.vocab_size", int, embedding[0]),
        hidden_size=hidden_size,
        intermediate_size=_inner_size(fields, arch, moe),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get(f"{arch}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        max_position=max_position,
        rope=_gguf_rope(fields, arch, max_position, tuple(rope_freqs)),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias=arch in ("qwen2", "qwen2moe") or "blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=arch in ("qwen3", "qwen3moe", "olmoe", *_HYBRIDS),
        whole_qk_norm=arch == "olmoe",
        sliding_window=window,
        attention_sinks=arch == "gpt-oss",
        sliding_layers=_sliding_layers(arch, num_layers) if window else (),
        moe=moe,
        gated_delta=gguf_gated_delta(fields, arch, num_layers) if hybrid else None,
        attention_gate=hybrid,
        rotary_dim=gguf_rotary_dim(fields, arch, head_dim) if hybrid else None,
        multipliers=_gguf_multipliers(fields, arch),
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id", int, None),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
    )


def _blocks(fields: GGUFFields, arch: str) -> int:
    """Reads the layers of the text model: the last blocks of a hybrid's file may be those of its drafter."""
    blocks = fields.get(f"{arch}.block_count", int)
    return blocks - fields.get(f"{arch}.nextn_predict_layers", int, 0) if arch in _HYBRIDS else blocks


def _sliding_layers(arch: str, num_layers: int) -> tuple[bool, ...]:
    """Lists the sliding layers: all, but of gpt-oss every second one from the first on."""
    return tuple(arch != "gpt-oss" or layer % 2 == 0 for layer in range(num_layers))


def _inner_size(fields: GGUFFields, arch: str, moe: MoeConfig | None) -> int:
    """Reads the size of a dense MLP; files of experts alone may lack it."""
    key = f"{arch}.feed_forward_length"
    return fields.get(key, int) if moe is None else fields.get(key, int, 0) or moe.intermediate_size


def _gguf_moe(
    fields: GGUFFields, arch: str, shapes: Mapping[str, tuple[int, ...]], num_layers: int
) -> MoeConfig | None:
    """Reads the experts; sizes are those of the tensors, because older files lack some of the keys."""
    count = fields.get(f"{arch}.expert_count", int, 0)
    if not count:
        if arch in _WITH_EXPERTS:
            raise fields.error(f"{arch}.expert_count", "is missing")
        return None
    if arch not in ("llama", *_WITH_EXPERTS):
        raise fields.error(f"{arch}.expert_count", f"describes a mixture of experts, which {arch} does not have")
    for key, expected in (("expert_gating_func", 3 if arch == "gpt-oss" else 1), ("expert_weights_scale", 1.0)):
        if fields.get(f"{arch}.{key}", type(expected), expected) not in (expected, 0):
            raise fields.error(f"{arch}.{key}", f"must be {expected} for architecture {arch}")
    for key in ("expert_group_count", "expert_group_used_count"):
        if fields.get(f"{arch}.{key}", int, 0) > 1:
            raise fields.error(f"{arch}.{key}", "must be at most 1, routing by groups of experts is not supported")
    # the drafter's too, which a file may hold alone
    with_experts = [layer for layer in range(num_layers + 1) if f"blk.{layer}.ffn_gate_inp.weight" in shapes]
    if not with_experts:
        raise fields.error(f"{arch}.expert_count", "describes experts, but no layer has a router")
    first = f"blk.{with_experts[0]}"
    names = f"{first}.ffn_down_exps.weight", f"{first}.ffn_down.0.weight", f"{first}.ffn_down_shexp.weight"
    fused, single, shared = (shapes.get(name, (0,)) for name in names)
    return fields.build(
        MoeConfig,
        num_experts=count,
        experts_per_token=fields.get(f"{arch}.expert_used_count", int),
        intermediate_size=max(fused[-1], single[-1]),
        renormalise=arch == "gpt-oss"
        or fields.get(f"{arch}.{_norm_key(fields, arch)}", bool, arch not in ("qwen2moe", "olmoe")),
        shared_size=shared[-1],
        shared_gate=shared[-1] > 0 and arch != "granitemoe",
        dense_layers=frozenset(range(num_layers)) - frozenset(with_experts),
        router_bias=f"{first}.ffn_gate_inp.bias" in shapes,
        expert_bias=f"{first}.ffn_down_exps.bias" in shapes,
        **(_GPT_OSS_GATE if arch == "gpt-oss" else {}),
    )


def _norm_key(fields: GGUFFields, arch: str) -> str:
    """Returns the key that says whether the weights of chosen experts are normalised; Ollama has a name of its own."""
    return "norm_top_k_prob" if f"{arch}.norm_top_k_prob" in fields.data else "expert_weights_norm"


def _gguf_multipliers(fields: GGUFFields, arch: str) -> Multipliers:
    """Reads Granite's factors; for llama.cpp a missing one, or 0, is none."""
    if arch not in ("granite", "granitemoe"):
        return PLAIN
    if not fields.get(f"{arch}.rope.scaling.finetuned", bool, True):  # llama.cpp: whether positions are rotated at all
        raise fields.error(f"{arch}.rope.scaling.finetuned", "must be true, layers without positions are not supported")
    return fields.build(
        Multipliers,
        embedding=fields.get(f"{arch}.embedding_scale", float, 0.0) or 1.0,
        attention=fields.get(f"{arch}.attention.scale", float, 0.0) or None,
        residual=fields.get(f"{arch}.residual_scale", float, 0.0) or 1.0,
        logits_divisor=fields.get(f"{arch}.logit_scale", float),
    )


def _gguf_rope(fields: GGUFFields, arch: str, max_position: int, freq_divisors: tuple[float, ...]) -> RopeConfig:
    prefix = f"{arch}.rope."
    theta = fields.get(prefix + "freq_base", float, RopeConfig.theta)
    factor = fields.get(prefix + "scaling.factor", float, fields.get(prefix + "scale_linear", float, 0.0))
    # converters store factor 0 or 1 for "none", and omit the type for the old linear scaling
    kind = fields.get(prefix + "scaling.type", str, "linear")
    for key in ("attn_factor", "yarn_attn_factor") if kind != "yarn" else ():
        if fields.get(f"{prefix}scaling.{key}", float, 1.0) != 1.0:
            raise fields.error(f"{prefix}scaling.{key}", f"is only supported with yarn, not with {kind}")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return fields.build(RopeConfig, theta=theta, freq_divisors=freq_divisors)
    if kind not in ("linear", "yarn"):
        raise fields.error(prefix + "scaling.type", f"must be none, linear or yarn, got {kind!r}")
    if fields.get(prefix + "scaling.yarn_log_multiplier", float, 0.0) != 0.0:
        raise fields.error(prefix + "scaling.yarn_log_multiplier", "is only supported with the value 0.0")
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
        attn_factor=_attn_factor(fields, prefix) if kind == "yarn" else 1.0,
        extrapolation_factor=_extrapolation_factor(fields, prefix, kind),
        truncate=arch != "gpt-oss",  # no key says so; OpenAI's model does not round the bounds of the ramp
        freq_divisors=freq_divisors,
    )


def _attn_factor(fields: GGUFFields, prefix: str) -> float:
    """Reads the factor that multiplies yarn's own scale of attention.

    Converters store `attention_factor`, which replaces that scale, and `attn_factor`, which multiplies it, under one
    key. Only the latter is below 1. Raises ValueError for other values, as for two keys that differ.
    """
    named, stored = prefix + "scaling.attn_factor", prefix + "scaling.yarn_attn_factor"
    factor = fields.get(stored, float, None)
    if factor is None:
        return fields.get(named, float, 1.0)
    if factor >= 1:
        raise fields.error(stored, f"must be below 1, got {factor}; it may replace or multiply yarn's own, see {named}")
    if fields.get(named, float, factor) != factor:
        raise fields.error(named, f"contradicts {stored}, {factor}")
    return factor


def _extrapolation_factor(fields: GGUFFields, prefix: str, kind: str) -> float:
    """Reads the factor of unscaled frequencies; for llama.cpp a negative one is none, and 0 means linear scaling."""
    key = prefix + "scaling.yarn_ext_factor"
    factor = fields.get(key, float, -1.0)
    if factor >= 0 and (factor == 0) != (kind == "linear"):
        raise fields.error(key, f"must {'' if kind == 'linear' else 'not '}be 0 with {kind} scaling, got {factor}")
    return 1.0 if factor <= 0 else factor
