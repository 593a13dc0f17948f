"""Drafters of random weights in published sizes, for work on speed: `random:<preset>` in place of a path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specengine.models.checkpoint_base import layer_tensors
from specengine.models.checkpoint_random import RandomCheckpoint
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.presets import PRESETS

Shapes = dict[str, tuple[int, ...]]


def random_fasteagle(preset: str, levels: int = 7) -> DraftCheckpoint:
    """As many layers of the target's shape as its paper has, and the whole vocabulary. Raises ValueError for a preset
    that does not exist."""
    c = _preset(preset)
    size = c.hidden_size
    shapes: Shapes = {"fc_features.weight": (size, 3 * size), "fc_input.weight": (size, 2 * size)}
    shapes |= {f"{name}.weight": (size,) for name in ("fc_norm.0", "fc_norm.1", "fc_norm.2")}
    for i in range(levels):
        shapes |= layer_tensors(c, f"layers.{i}.")
    return _checkpoint(preset, shapes, c, {"num_hidden_layers": levels})


def random_eagle3(preset: str, vocabulary: int = 32000) -> DraftCheckpoint:
    """One layer of the target's shape and a head of `vocabulary` tokens, the first ones, or all there are. Raises
    ValueError for a preset that does not exist."""
    c = replace(_preset(preset), qkv_bias=False, qk_norm=False)
    size, rows = c.hidden_size, min(vocabulary, c.vocab_size)
    shapes: Shapes = {"fc.weight": (size, 3 * size), "norm.weight": (size,), "lm_head.weight": (rows, size)}
    shapes["d2t"] = (rows,)
    shapes |= layer_tensors(c, "midlayer.") | {"midlayer.hidden_norm.weight": (size,)}
    for part, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
        shapes[f"midlayer.self_attn.{part}_proj.weight"] = (heads * c.head_dim, 2 * size)
    return _checkpoint(preset, shapes, c, {"num_hidden_layers": 1, "draft_vocab_size": rows})


def _preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        raise ValueError(f"drafter: unknown preset {name!r}; expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _checkpoint(preset: str, shapes: Shapes, c: ModelConfig, fields: Mapping[str, Any]) -> DraftCheckpoint:
    files = RandomCheckpoint(c, source=f"random:{preset}", shapes=shapes, integers=("d2t",))
    json = {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": 2048,
        "vocab_size": c.vocab_size,
        # tiny presets have fewer layers than low, middle and high
        "eagle_aux_hidden_state_layer_ids": [2, c.num_layers // 2, c.num_layers - 3] if c.num_layers > 6 else [0, 1, 2],
    }
    return DraftCheckpoint(files, json | dict(fields))
