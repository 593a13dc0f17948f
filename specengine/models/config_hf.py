"""Model configuration from a Hugging Face checkpoint folder or config.json dict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specengine.models.config import ARCHITECTURES, ROPE_KINDS, ModelConfig, RopeConfig, check_layers
from specengine.models.experts.hf_config import moe_config
from specengine.models.gated_delta.hf_config import (
    HF_HYBRIDS,
    HYBRIDS,
    MROPE,
    gated_delta_config,
    hybrid_fields,
    rotary_dim,
)
from specengine.utils.json_fields import Fields
from specengine.utils.json_file import read_json_object
from specengine.utils.multipliers import PLAIN, Multipliers

_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    **HF_HYBRIDS,
}
# defaults of transformers: of most families, and those of a family that differ; hybrids have a list of their own
_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_DEFAULTS: dict[str, dict[str, Any]] = {
    **{family: {"max_position_embeddings": 2048} for family in ("llama", "granite", "granitemoe")},
    "mistral": {"max_position_embeddings": 131072},
    "mixtral": {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6},
    "olmoe": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "head_dim": 64,
        "attention_bias": True,
        "rope_theta": 150000.0,
    },
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# rope key in config.json -> (RopeConfig field, type); unlisted keys are refused, they could change the arithmetic
_HF_ROPE_FIELDS: dict[str, tuple[str, type]] = {
    "rope_theta": ("theta", float),
    "factor": ("factor", float),
    "original_max_position_embeddings": ("original_max_position", int),
    "low_freq_factor": ("low_freq_factor", float),
    "high_freq_factor": ("high_freq_factor", float),
    "beta_fast": ("beta_fast", float),
    "beta_slow": ("beta_slow", float),
    "mscale": ("mscale", float),
    "mscale_all_dim": ("mscale_all_dim", float),
    "attention_factor": ("attention_factor", float),
    "attn_factor": ("attn_factor", float),
    "extrapolation_factor": ("extrapolation_factor", float),
    "truncate": ("truncate", bool),
}
# ModelConfig field -> key in config.json, of the fields that readers and writers of checkpoints spell alike
HF_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
}
_GRANITE = ("granite", "granitemoe")
_HF_ROPE_IGNORED = {"type", "rope_type", "finetuned", "partial_rotary_factor"}


def config_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Maps a Hugging Face config dict, in the spelling of transformers 4 or 5, with the defaults of transformers.

    Raises ValueError naming the wrong field.
    """
    fields = Fields(config, where)
    architecture = _hf_architecture(fields)
    hybrid = architecture in HYBRIDS
    fields = hybrid_fields(fields, architecture) if hybrid else Fields(_with_defaults(config, architecture), where)
    config = fields.data
    check_activation(fields)

    hidden_size = fields.get("hidden_size", int)
    num_heads = fields.get("num_attention_heads", int)
    head_dim = head_size(fields, 128 if architecture == "qwen3" else None)
    if architecture != "llama" and "num_key_value_heads" not in config:
        raise fields.error("num_key_value_heads", "is missing")
    num_layers = fields.build(check_layers, num_layers=fields.get("num_hidden_layers", int))
    max_position = fields.get("max_position_embeddings", int)
    window, sliding_layers = (None, ()) if hybrid else _hf_sliding(fields, architecture, num_layers)
    moe = moe_config(fields, architecture, num_layers)
    biased = architecture in ("llama", "qwen3", "qwen3_moe", "olmoe", "gpt_oss", *_GRANITE, *HYBRIDS)
    attention_bias = biased and fields.get("attention_bias", bool, False)
    dtype = fields.get("dtype", str, None) or fields.get("torch_dtype", str, None)
    bos = fields.ids("bos_token_id")
    return fields.build(
        ModelConfig,
        architecture=architecture,
        vocab_size=fields.get("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=fields.get("intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", int, num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.get("rms_norm_eps", float),
        max_position=max_position,
        rope=rope_config(fields, max_position, partial=hybrid),
        tie_embeddings=fields.get("tie_word_embeddings", bool, False),
        qkv_bias=attention_bias or architecture == "qwen2" or _qwen2_moe_bias(fields, architecture),
        output_bias=attention_bias,
        mlp_bias=architecture in ("llama", "granite") and fields.get("mlp_bias", bool, False),
        qk_norm=architecture in ("qwen3", "qwen3_moe", "olmoe", *HYBRIDS),
        whole_qk_norm=architecture == "olmoe",
        attention_sinks=architecture == "gpt_oss",
        sliding_window=window,
        sliding_layers=sliding_layers,
        moe=moe,
        gated_delta=gated_delta_config(fields, num_layers) if hybrid else None,
        attention_gate=hybrid,
        rotary_dim=rotary_dim(fields, head_dim) if hybrid else None,
        multipliers=_multipliers(fields) if architecture in _GRANITE else PLAIN,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.ids("eos_token_id"),
        dtype=dtype.removeprefix("torch.") if dtype else None,
    )


def _with_defaults(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    scaled = config.get("rope_parameters") or config.get("rope_scaling") or architecture != "gpt_oss"
    rope = {} if scaled else {"rope_parameters": _GPT_OSS_ROPE}
    return {**_COMMON, **_DEFAULTS.get(architecture, {}), **config, **rope}


def _qwen2_moe_bias(fields: Fields, architecture: str) -> bool:
    return architecture == "qwen2_moe" and bool(fields.get("qkv_bias", bool, True))


def _multipliers(fields: Fields) -> Multipliers:
    """Reads Granite's factors; transformers' default is 1 for each, for scores of attention too."""
    return fields.build(
        Multipliers,
        embedding=fields.get("embedding_multiplier", float, 1.0),
        attention=fields.get("attention_multiplier", float, 1.0),
        residual=fields.get("residual_multiplier", float, 1.0),
        logits_divisor=fields.get("logits_scaling", float, 1.0),
    )


def hf_sizes(config: ModelConfig) -> dict[str, Any]:
    """Returns the sizes of a model under their keys in config.json."""
    return {key: getattr(config, name) for name, key in HF_SIZES.items()}


def check_activation(fields: Fields) -> None:
    """Raises ValueError for an MLP activation other than SiLU."""
    activation = fields.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", f"must be 'silu', got {activation!r}")


def head_size(fields: Fields, default: int | None = None) -> int:
    """Reads head_dim; where neither the file nor `default` gives it, the heads divide the hidden size evenly.

    Raises ValueError where they cannot.
    """
    head_dim: int | None = fields.get("head_dim", int, default)
    if head_dim is not None:
        return head_dim
    hidden_size = fields.get("hidden_size", int)
    num_heads = fields.get("num_attention_heads", int)
    if num_heads <= 0 or hidden_size % num_heads:
        raise fields.error("hidden_size", f"must be a multiple of num_attention_heads {num_heads}")
    return hidden_size // num_heads


def _hf_architecture(fields: Fields) -> str:
    names = fields.get("architectures", list, None)
    if names:
        causal = re.sub(r"(Text)?Model$", "ForCausalLM", str(names[0]))  # a base model, its head tied or beside
        if causal not in _HF_ARCHITECTURES:
            expected = ", ".join(_HF_ARCHITECTURES)
            raise fields.error("architectures", f"must be one of {expected}, got {names[0]!r}")
        return _HF_ARCHITECTURES[causal]
    model_type = fields.get("model_type", str)
    model_type = model_type.removesuffix("_text") if model_type.startswith("qwen3_5") else model_type
    if model_type not in ARCHITECTURES:
        raise fields.error("model_type", f"must be one of {', '.join(ARCHITECTURES)}, got {model_type!r}")
    return model_type


def _hf_sliding(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    types = fields.get("layer_types", list, None)
    known = ("full_attention", "sliding_attention")
    if types is not None and (len(types) != num_layers or any(kind not in known for kind in types)):
        raise fields.error("layer_types", f"must name one of {', '.join(known)} for each of {num_layers} layers")
    if architecture in ("llama", "olmoe", *_GRANITE):
        if types and "sliding_attention" in types:
            raise fields.error("layer_types", f"names sliding_attention, which {architecture} does not have")
        return None, ()
    # an explicit null means no window; an absent field means the class default of transformers
    default = {"gpt_oss": 128, "mixtral": None}.get(architecture, 4096)
    window: int | None = fields.get("sliding_window", int, None if "sliding_window" in fields.data else default)
    if architecture.startswith("qwen") and not fields.get("use_sliding_window", bool, False):
        window = None
    if architecture in ("mistral", "mixtral", "qwen3_moe"):  # transformers' Qwen3-MoE reads no list of layers
        if types and architecture != "qwen3_moe" and types != [known[window is not None]] * num_layers:
            raise fields.error("layer_types", "must agree with sliding_window for every layer of this family")
        return window, (True,) * num_layers if window is not None else ()
    if types is None and architecture in ("gpt_oss", "qwen2_moe"):  # every second layer
        end = num_layers if architecture == "gpt_oss" else fields.get("max_window_layers", int, 28)
        flags = tuple(window is not None and layer % 2 == 0 and layer < end for layer in range(num_layers))
    elif types is None:
        first = fields.get("max_window_layers", int, 28)
        flags = tuple(window is not None and layer >= first for layer in range(num_layers))
    else:
        flags = tuple(kind == "sliding_attention" for kind in types)
    if any(flags) and window is None:
        raise fields.error("layer_types", "names sliding_attention but no sliding_window is in use")
    return (window, flags) if any(flags) else (None, ())


def rope_config(fields: Fields, max_position: int, partial: bool = False) -> RopeConfig:
    """Reads the rotary settings in either spelling of config.json; a missing base is 10000.

    partial: the model may rotate a part of each head, see `rotary_dim`.
    """
    name = "rope_parameters" if fields.data.get("rope_parameters") else "rope_scaling"
    rope = Fields(fields.data.get(name) or {}, f"{fields.where}: {name}")
    unknown = set(rope.data) - set(_HF_ROPE_FIELDS) - _HF_ROPE_IGNORED - (MROPE if partial else set())
    if unknown:
        raise rope.error(min(unknown), "is not supported")
    for source in () if partial else (rope, fields):
        if source.get("partial_rotary_factor", float, 1.0) != 1.0:
            raise source.error("partial_rotary_factor", "must be 1, partial rotation is not supported")
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    values: dict[str, Any] = {"theta": fields.get("rope_theta", float, RopeConfig.theta)}
    for key, (target, type_) in _HF_ROPE_FIELDS.items():
        if rope.data.get(key) is not None:
            values[target] = rope.get(key, type_)
    if kind in ("llama3", "yarn"):
        original = fields.get("original_max_position_embeddings", int, None)
        values["original_max_position"] = original or values.get("original_max_position", max_position)
    if kind == "yarn" and "factor" not in values and values["original_max_position"] > 0:
        values["factor"] = max_position / values["original_max_position"]
    if kind != "default" and kind in ROPE_KINDS:
        for key in ("factor",) if kind != "llama3" else ("factor", "low_freq_factor", "high_freq_factor"):
            if key not in values:
                raise rope.error(key, "is missing")
    return rope.build(RopeConfig, kind=kind, **values)


def read_model_config(folder: str | Path) -> ModelConfig:
    """Reads config.json of a checkpoint folder and adds the end tokens of generation_config.json."""
    path = Path(folder) / "config.json"
    config = dict(read_json_object(path))
    generation = Path(folder) / "generation_config.json"
    if generation.is_file():
        extra = Fields(read_json_object(generation), str(generation)).ids("eos_token_id")
        config["eos_token_id"] = list(dict.fromkeys(Fields(config, str(path)).ids("eos_token_id") + extra))
    return config_from_hf(config, str(path))
