"""Adapters of hybrids: their matrices as transformers names them, brought to the rows and columns of the ops."""

from __future__ import annotations

from dataclasses import replace

import torch

from specengine.models.config import ModelConfig
from specengine.models.gated_delta.head_order import tiled_order
from specengine.models.gated_delta.tensors import interleaved_rows
from specengine.models.gated_delta.weights import IN_PROJECTIONS
from specengine.models.lora.matrices import LoraMatrices
from specengine.utils.gated_delta_config import GatedDeltaConfig

_FUSED = ("qkvz", "ba")  # of Qwen3-Next, whose modules interleave their parts by key head


def module_shapes(config: ModelConfig, delta: GatedDeltaConfig) -> dict[str, tuple[int, int]]:
    """Lists the linear modules of a layer of gated delta rule, and their shapes, as transformers has them."""
    shapes = delta.matrices(config.hidden_size)
    if config.architecture == "qwen3_next":
        out = {"out_proj": shapes["out_proj"]}
        sizes = {kind: sum(map(len, interleaved_rows(delta, kind).values())) for kind in _FUSED}
        shapes = {f"in_proj_{kind}": (rows, config.hidden_size) for kind, rows in sizes.items()} | out
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def places(delta: GatedDeltaConfig, hidden: int) -> dict[str, dict[str, int]]:
    """Returns the matrices of each attention projection, and the row of the projection where each begins."""
    shapes, first, firsts = delta.matrices(hidden), 0, {}
    for name in IN_PROJECTIONS:
        firsts[f"linear_attn.{name}"] = first
        first += shapes[name][0]
    return {"qkv": firsts, "attention_out": {"linear_attn.out_proj": 0}}


def in_layout(adapter: dict[str, LoraMatrices], config: ModelConfig) -> dict[str, LoraMatrices]:
    """Returns an adapter with one matrix for each part of a layer, whose value heads are ordered as the target's."""
    delta = config.gated_delta
    if delta is None:
        return adapter
    found: dict[str, LoraMatrices] = {}
    for module, matrices in adapter.items():
        prefix, inside, name = module.partition("linear_attn.")
        for part, each in _parts(name, matrices, delta).items() if inside else ():
            found[f"{prefix}{inside}{part}"] = _ordered(part, each, delta)
        if not inside:
            found[module] = matrices
    return found


def _parts(name: str, matrices: LoraMatrices, delta: GatedDeltaConfig) -> dict[str, LoraMatrices]:
    kind = name.removeprefix("in_proj_")
    if kind not in _FUSED:
        return {name: matrices}
    rows = interleaved_rows(delta, kind)
    return {f"in_proj_{part}": replace(matrices, b=matrices.b[own]) for part, own in rows.items()}


def _ordered(part: str, matrices: LoraMatrices, delta: GatedDeltaConfig) -> LoraMatrices:
    order: torch.Tensor | None = tiled_order(part, delta) if delta.tiled else None
    if order is None:
        return matrices
    return replace(matrices, a=matrices.a[:, order]) if part == "out_proj" else replace(matrices, b=matrices.b[order])
