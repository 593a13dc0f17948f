"""Drafters of random weights in published sizes, to measure speed: `random:<preset>` stands for a path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specengine.models.checkpoint_base import layer_tensors
from specengine.models.checkpoint_random import RandomCheckpoint
from specengine.models.config import ModelConfig
from specengine.models.config_hf import hf_sizes
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.hidden_states import eagle3_layers
from specengine.models.presets import PRESETS

Shapes = dict[str, tuple[int, ...]]


def random_fasteagle(preset: str, levels: int = 7) -> DraftCheckpoint:
    """Makes a FastEagle drafter with `levels` layers of the target's shape (7 in the paper) and the whole vocabulary.

    Raises ValueError for an unknown preset.
    """
    c = _preset(preset)
    size = c.hidden_size
    shapes: Shapes = {"fc_features.weight": (size, 3 * size), "fc_input.weight": (size, 2 * size)}
    shapes |= {f"{name}.weight": (size,) for name in ("fc_norm.0", "fc_norm.1", "fc_norm.2")}
    for i in range(levels):
        shapes |= layer_tensors(c, f"layers.{i}.")
    return _checkpoint(preset, shapes, c, {"num_hidden_layers": levels})


def random_eagle3(preset: str, vocabulary: int = 32000) -> DraftCheckpoint:
    """Makes an EAGLE-3 drafter: one layer of the target's shape and a head of the first `vocabulary` tokens at most.

    Raises ValueError for an unknown preset.
    """
    c = replace(_preset(preset), qkv_bias=False, qk_norm=False)
    size = c.hidden_size
    rows = min(vocabulary, c.vocab_size)
    shapes: Shapes = {"fc.weight": (size, 3 * size), "norm.weight": (size,), "lm_head.weight": (rows, size)}
    shapes["d2t"] = (rows,)
    shapes |= layer_tensors(c, "midlayer.") | {"midlayer.hidden_norm.weight": (size,)}
    for part, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
        shapes[f"midlayer.self_attn.{part}_proj.weight"] = (heads * c.head_dim, 2 * size)
    return _checkpoint(preset, shapes, c, {"num_hidden_layers": 1, "draft_vocab_size": rows})


def random_dflash(preset: str, layers: int = 5, block_size: int = 16) -> DraftCheckpoint:
    """Makes a DFlash drafter of layers of the target's shape with q/k norms, the sizes of z-lab's files by default.

    Raises ValueError for an unknown preset.
    """
    c = replace(_preset(preset), qkv_bias=False, qk_norm=True)
    size, count = c.hidden_size, min(layers, c.num_layers)
    features = [round(c.num_layers * (i + 1) / (count + 1)) - 1 for i in range(count)]
    shapes: Shapes = {"fc.weight": (size, count * size), "hidden_norm.weight": (size,), "norm.weight": (size,)}
    for i in range(layers):
        shapes |= layer_tensors(c, f"layers.{i}.")
    own = {"mask_token_id": 0, "target_layer_ids": features}
    return _checkpoint(preset, shapes, c, {"num_hidden_layers": layers, "block_size": block_size, "dflash_config": own})


def _preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        raise ValueError(f"drafter: unknown preset {name!r}; expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _checkpoint(preset: str, shapes: Shapes, c: ModelConfig, fields: Mapping[str, Any]) -> DraftCheckpoint:
    files = RandomCheckpoint(c, source=f"random:{preset}", shapes=shapes, integers=("d2t",))
    json = hf_sizes(c) | {
        "max_position_embeddings": 2048,
        # tiny presets have too few layers for EAGLE-3's choice
        "eagle_aux_hidden_state_layer_ids": list(eagle3_layers(c.num_layers)) if c.num_layers > 6 else [0, 1, 2],
    }
    return DraftCheckpoint(files, json | dict(fields))
