"""Layers of drafters in the target's shape, and with its weights as a start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specengine.models.config import ModelConfig
from specengine.train.objectives.base import Frozen
from specengine.train.objectives.llama_layer import LayerShape


def shape_of(config: ModelConfig, **changes: Any) -> LayerShape:
    """A layer like the target's. Its rotary base is taken, scaling is not: a drafter goes by its own config.json."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
    }
    return LayerShape(**(sizes | changes))


def layer_json(config: ModelConfig, layers: int, architecture: str) -> dict[str, Any]:
    """config.json of a drafter whose layers are made with shape_of()."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def low_middle_high(config: ModelConfig) -> tuple[int, int, int]:
    """The layers of the target whose input is read, as EAGLE-3 was published. Raises ValueError for too few layers."""
    layers = (2, config.num_layers // 2, config.num_layers - 3)
    if list(layers) != sorted(set(layers)):
        raise ValueError(
            f"target: the inputs of three rising layers are read, {config.num_layers} layers give {layers}"
        )
    return layers


def spread(layers: int, config: ModelConfig) -> list[int]:
    """So many layers of the target, evenly chosen, the first and the last among them (of one: the first)."""
    return torch.linspace(0, config.num_layers - 1, layers).round().long().tolist()


@torch.no_grad()
def start_from(layer: nn.Module, frozen: Frozen, number: int) -> None:
    """Gives the parameters of a layer the values that the target's layer has under the same names.

    A projection that reads more columns than the target's (EAGLE-3: the embedding, then the state) gets them for its
    last ones, and zeros for the others. What the target's layer has beside (biases, norms of q and k) is left out.
    """
    for name, parameter in layer.named_parameters():
        if name.startswith("cross_attn."):
            continue
        value = frozen.read(f"model.layers.{number}.{name.replace('hidden_norm', 'input_layernorm')}")
        parameter.zero_()[..., -value.shape[-1] :].copy_(value)
