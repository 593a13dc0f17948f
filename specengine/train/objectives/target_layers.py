"""Drafter layers in the target's shape, and the target's weights as their start."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from specengine.models.config import ModelConfig
from specengine.models.config_hf import hf_sizes
from specengine.models.hidden_states import eagle3_layers
from specengine.train.objectives.llama_layer import LayerShape
from specengine.train.objectives.target_weights import TargetWeights


def shape_of(config: ModelConfig, **changes: Any) -> LayerShape:
    """Returns the shape of the target's layers, with its rotary base but without rope scaling.

    Engines read the drafter's own config.json, which has no scaling.
    """
    sizes = {f.name: getattr(config, f.name) for f in fields(LayerShape) if hasattr(config, f.name)}
    return LayerShape(**(sizes | {"rope_theta": config.rope.theta} | changes))


def layer_json(config: ModelConfig, layers: int, architecture: str) -> dict[str, Any]:
    """Writes config.json of a drafter whose layers have the shape of shape_of()."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **(hf_sizes(config) | {"num_hidden_layers": layers}),
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def low_middle_high(config: ModelConfig) -> tuple[int, int, int]:
    """Returns eagle3_layers() of the target. Raises ValueError for a target with too few layers."""
    layers = eagle3_layers(config.num_layers)
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"target: the drafter reads three rising layers, {config.num_layers} layers give {layers}")
    return layers


def spread(layers: int, config: ModelConfig) -> list[int]:
    """Chooses layers of the target evenly, with the first and the last; a single one is the first."""
    return torch.linspace(0, config.num_layers - 1, layers).round().long().tolist()


@torch.no_grad()
def start_from(layer: nn.Module, target: TargetWeights, number: int) -> None:
    """Copies the parameters of the target's layer to a drafter's layer, by name.

    A projection that reads more columns than the target's (EAGLE-3: the embedding, then the hidden state) gets them in
    its last columns, and zeros in the others. Biases and norms of q and k have no place in a drafter's layer.
    """
    for name, parameter in layer.named_parameters():
        if name.startswith("cross_attn."):
            continue
        value = target.read(f"model.layers.{number}.{name.replace('hidden_norm', 'input_layernorm')}")
        parameter.zero_()[..., -value.shape[-1] :].copy_(value)
