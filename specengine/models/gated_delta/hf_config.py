"""The Hugging Face configurations of hybrids of gated delta rule and attention: Qwen3.5, its mixtures, Qwen3-Next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specengine.utils.gated_delta_config import CONV_WIDTH, GatedDeltaConfig
from specengine.utils.json_fields import Fields

HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
HF_HYBRIDS = {
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
}
MROPE = {"mrope_section", "mrope_interleaved"}  # the three positions of a text token are equal: ordinary rotation

# defaults of transformers' Qwen3_5TextConfig, Qwen3_5MoeTextConfig and Qwen3NextConfig
_COMMON = {
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "linear_conv_kernel_dim": CONV_WIDTH,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe": {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "qwen3_next": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
}
_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_OF_BOTH = ("dtype", "torch_dtype", "bos_token_id")  # a file of text and vision has these inside or outside


def hybrid_fields(fields: Fields, architecture: str) -> Fields:
    """Returns the fields of the text model, with the defaults of transformers.

    Files of text and vision have them in text_config. Raises ValueError naming the wrong field.
    """
    text = _text_fields(fields)
    given = {name: value for name, value in text.data.items() if value is not None}
    experts = {} if architecture == "qwen3_5" else _EXPERTS
    known = {**_COMMON, **_DEFAULTS[architecture], **experts, **given}
    known.setdefault("intermediate_size", known["moe_intermediate_size"] if experts else None)
    return Fields(known, text.where)


def text_config(values: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the values of config.json for the text model alone, from those of a model of text, or text and vision."""
    if values.get("text_config") is None:
        return dict(values)
    name = next(name for name, own in HF_HYBRIDS.items() if own == architecture)
    about = {"architectures": [name], "model_type": f"{architecture}_text"}
    return {**_text_fields(Fields(values, "config.json")).data, **about}


def _text_fields(fields: Fields) -> Fields:
    """Returns the fields of the text model, which a model of text and vision has in text_config."""
    outer = fields.data
    if outer.get("text_config") is None:
        return fields
    inner = Fields(outer["text_config"], f"{fields.where}: text_config")
    shared = {name: outer[name] for name in _OF_BOTH if inner.data.get(name) is None and name in outer}
    ends = dict.fromkeys(inner.ids("eos_token_id") + fields.ids("eos_token_id"))
    # transformers ties the weights of the whole model by the outer field
    tied = fields.get("tie_word_embeddings", bool, False)
    return Fields({**inner.data, **shared, "eos_token_id": list(ends), "tie_word_embeddings": tied}, inner.where)


def gated_delta_config(fields: Fields, num_layers: int) -> GatedDeltaConfig | None:
    """Reads the layers of gated delta rule; None where all layers have attention."""
    if fields.get("linear_conv_kernel_dim", int) != CONV_WIDTH:
        raise fields.error(
            "linear_conv_kernel_dim", f"must be {CONV_WIDTH}, got {fields.data['linear_conv_kernel_dim']}"
        )
    layers = _linear_layers(fields, num_layers)
    if not layers:
        return None
    return fields.build(
        GatedDeltaConfig,
        layers=layers,
        num_key_heads=fields.get("linear_num_key_heads", int),
        num_value_heads=fields.get("linear_num_value_heads", int),
        key_head_dim=fields.get("linear_key_head_dim", int),
        value_head_dim=fields.get("linear_value_head_dim", int),
    )


def rotary_dim(fields: Fields, head_dim: int) -> int | None:
    """Reads how many components of a head are rotated; None for all of them. The rotary settings go first."""
    name = "rope_parameters" if fields.data.get("rope_parameters") else "rope_scaling"
    rope = Fields(fields.data.get(name) or {}, f"{fields.where}: {name}")
    source = rope if rope.data.get("partial_rotary_factor") is not None else fields
    factor = source.get("partial_rotary_factor", float)
    if not 0 < factor <= 1:
        raise source.error("partial_rotary_factor", f"must be above 0 and at most 1, got {factor}")
    if head_dim >= 1 << 40:  # no float may hold it
        raise fields.error("head_dim", "is impossibly large")
    dim = int(head_dim * factor)
    if dim < 2 or dim % 2:
        raise source.error(
            "partial_rotary_factor", f"must rotate an even number of the {head_dim} components of a head, got {dim}"
        )
    return None if dim == head_dim else dim


def _linear_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    types: list[Any] | None = fields.get("layer_types", list, None)
    if types is None:
        interval = fields.get("full_attention_interval", int)
        if interval < 1:
            raise fields.error("full_attention_interval", f"must be positive, got {interval}")
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval)
    known = ("linear_attention", "full_attention")
    if len(types) != num_layers or any(kind not in known for kind in types):
        raise fields.error("layer_types", f"must name one of {', '.join(known)} for each of {num_layers} layers")
    if "full_attention" not in types:
        raise fields.error("layer_types", "must name full_attention at least once")
    return frozenset(layer for layer, kind in enumerate(types) if kind == "linear_attention")
