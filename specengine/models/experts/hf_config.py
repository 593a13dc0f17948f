"""The experts of a Hugging Face configuration, which every family spells in its own way."""

from __future__ import annotations

from specengine.models.config import MoeConfig
from specengine.utils.json_fields import Fields

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def moe_config(fields: Fields, architecture: str, num_layers: int) -> MoeConfig | None:
    """Reads the experts of a family; None for a dense one.

    Raises ValueError naming the wrong field, and for experts in a family that has none.
    """
    if architecture in ("mixtral", "granitemoe"):
        return fields.build(
            MoeConfig,
            num_experts=_count(fields, 8),
            experts_per_token=fields.get("num_experts_per_tok", int, 2),
            intermediate_size=fields.get("intermediate_size", int),
            shared_size=fields.get("shared_intermediate_size", int, 0) if architecture == "granitemoe" else 0,
        )
    if architecture == "olmoe":
        if fields.get("clip_qkv", float, None) is not None:
            raise fields.error("clip_qkv", "must be null, clipped queries, keys and values are not supported")
        return fields.build(
            MoeConfig,
            num_experts=_count(fields, 64),
            experts_per_token=fields.get("num_experts_per_tok", int, 8),
            intermediate_size=fields.get("intermediate_size", int),
            renormalise=fields.get("norm_topk_prob", bool, False),
        )
    if architecture in ("qwen2_moe", "qwen3_moe"):
        shared = architecture == "qwen2_moe"
        shared_size = fields.get("shared_expert_intermediate_size", int, 5632) if shared else 0
        return fields.build(
            MoeConfig,
            num_experts=_count(fields, 60 if shared else 128),
            experts_per_token=fields.get("num_experts_per_tok", int, 4 if shared else 8),
            intermediate_size=fields.get("moe_intermediate_size", int, 1408 if shared else 768),
            renormalise=fields.get("norm_topk_prob", bool, False),
            shared_size=shared_size,
            shared_gate=shared_size > 0,
            dense_layers=_dense_layers(fields, num_layers),
        )
    if architecture in ("qwen3_5_moe", "qwen3_next"):
        shared_size = fields.get("shared_expert_intermediate_size", int)
        return fields.build(
            MoeConfig,
            num_experts=_count(fields, 0),
            experts_per_token=fields.get("num_experts_per_tok", int),
            intermediate_size=fields.get("moe_intermediate_size", int),
            renormalise=architecture == "qwen3_5_moe" or fields.get("norm_topk_prob", bool),
            shared_size=shared_size,
            shared_gate=shared_size > 0,
            dense_layers=_dense_layers(fields, num_layers) if architecture == "qwen3_next" else frozenset(),
        )
    if architecture == "gpt_oss":
        return fields.build(
            MoeConfig,
            num_experts=_count(fields, 128),
            experts_per_token=fields.get("num_experts_per_tok", int, 4),
            intermediate_size=fields.get("intermediate_size", int),
            router_bias=True,
            expert_bias=True,
            swiglu_limit=_positive(fields, "swiglu_limit", 7.0),
            swiglu_alpha=_positive(fields, "swiglu_alpha", 1.702),
        )
    for name in (*_COUNTS, "num_experts_per_tok"):
        if fields.data.get(name):
            raise fields.error(name, f"describes a mixture of experts, which {architecture} does not have")
    return None


def _count(fields: Fields, default: int) -> int:
    """Reads the number of experts; transformers spells it in two ways."""
    name = next((name for name in _COUNTS if fields.data.get(name) is not None), _COUNTS[0])
    return int(fields.get(name, int, default))


def _positive(fields: Fields, name: str, default: float) -> float:
    value: float = fields.get(name, float, default)
    if not value > 0:
        raise fields.error(name, f"must be positive, got {value}")
    return value


def _dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    step = fields.get("decoder_sparse_step", int, 1)
    if step < 1:
        raise fields.error("decoder_sparse_step", f"must be positive, got {step}")
    listed = fields.get("mlp_only_layers", list, None) or []
    if any(not isinstance(layer, int) or not 0 <= layer < num_layers for layer in listed):
        raise fields.error("mlp_only_layers", f"must list layers from 0 to {num_layers - 1}")
    return frozenset(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
