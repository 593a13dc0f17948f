"""The layers of gated delta rule of a GGUF file's metadata, architectures qwen35, qwen35moe and qwen3next."""

from __future__ import annotations

from typing import Any

from specengine.models.config import ModelConfig
from specengine.models.gguf_fields import GGUFFields
from specengine.utils.gated_delta_config import CONV_WIDTH, GatedDeltaConfig


def gguf_gated_delta(fields: GGUFFields, arch: str, num_layers: int) -> GatedDeltaConfig | None:
    """Reads the sizes. Raises ValueError naming the wrong field.

    Converters tile the value heads of Qwen3.5, and leave those of Qwen3-Next grouped; Ollama's says so in a key.
    """
    width = fields.get(f"{arch}.ssm.conv_kernel", int)
    if width != CONV_WIDTH:
        raise fields.error(f"{arch}.ssm.conv_kernel", f"must be {CONV_WIDTH}, got {width}")
    heads, values = fields.get(f"{arch}.ssm.time_step_rank", int), fields.get(f"{arch}.ssm.inner_size", int)
    if heads < 1 or values % heads:
        raise fields.error(f"{arch}.ssm.inner_size", f"must be a multiple of ssm.time_step_rank {heads}, got {values}")
    layers = _linear_layers(fields, arch, num_layers)
    if not layers:
        return None
    return fields.build(
        GatedDeltaConfig,
        layers=layers,
        num_key_heads=fields.get(f"{arch}.ssm.group_count", int),
        num_value_heads=heads,
        key_head_dim=fields.get(f"{arch}.ssm.state_size", int),
        value_head_dim=values // heads,
        tiled=fields.get(f"{arch}.ssm.v_head_reordered", bool, arch != "qwen3next"),
    )


def _linear_layers(fields: GGUFFields, arch: str, num_layers: int) -> frozenset[int]:
    """Reads a flag for each block, those of a drafter too, or the heads of keys in each, which Ollama has as 0.

    Files with neither have attention at an interval.
    """
    key = f"{arch}.attention.recurrent_layers"
    flags: list[Any] | None = fields.get(key, list, None)
    if flags is not None:
        if len(flags) < num_layers or any(type(flag) not in (bool, int) for flag in flags):
            raise fields.error(key, f"must have a flag for each of {num_layers} layers")
        return frozenset(layer for layer in range(num_layers) if flags[layer])
    if (without := fields.layers_without(f"{arch}.attention.head_count_kv")) is not None:
        return frozenset(layer for layer in range(num_layers) if layer in without)
    interval = fields.get(f"{arch}.full_attention_interval", int, 4)  # llama.cpp's default
    if interval < 1:
        raise fields.error(f"{arch}.full_attention_interval", f"must be positive, got {interval}")
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval)


def delta_keys(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of a hybrid, without its architecture: what `gguf_gated_delta` reads."""
    delta = config.gated_delta
    if delta is None:
        return {}
    half = config.rotated // 2
    width = half // 3  # of height and width in a picture; a text's three positions are equal
    return {
        "full_attention_interval": min(set(range(config.num_layers)) - delta.layers) + 1,
        "rope.dimension_sections": [half - 2 * width, width, width, 0],
        "ssm.conv_kernel": CONV_WIDTH,
        "ssm.state_size": delta.key_head_dim,
        "ssm.group_count": delta.num_key_heads,
        "ssm.time_step_rank": delta.num_value_heads,
        "ssm.inner_size": delta.value_size,
    }


def gguf_rotary_dim(fields: GGUFFields, arch: str, head_dim: int) -> int | None:
    """Reads how many components of a head are rotated; None for all of them."""
    dim = fields.get(f"{arch}.rope.dimension_count", int, head_dim)
    return None if dim == head_dim else dim
