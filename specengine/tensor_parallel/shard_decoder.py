"""The decoder of one rank: its part of every layer, which meets the other ranks' where it needs their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specengine.models.config import ModelConfig
from specengine.ops import Ops
from specengine.ops.decoder import Layer
from specengine.ops.experts.moe import ExpertOps, ExpertProjection, Groups
from specengine.ops.layerwise.decoder import LayerwiseDecoder
from specengine.ops.weight import Projection
from specengine.tensor_parallel.passes import Add, Gather
from specengine.tensor_parallel.shards import ShardedExperts, ShardedProjection, SummedProjection


def shard_decoder(
    ops: Ops,
    gather: Gather,
    add: Add | None,
    config: ModelConfig,
    layers: Sequence[Layer],
    final_norm: torch.Tensor,
    hidden_state_layers: Sequence[int] = (),
    out_dtype: torch.dtype = torch.float32,
) -> LayerwiseDecoder:
    """Makes a decoder that runs op by op, so that the ranks can meet in between; it reads its rows from `inputs`.

    gather, add: see passes.Passes.
    """

    def linear(x: torch.Tensor, layer: Projection) -> torch.Tensor:
        if isinstance(layer, SummedProjection):
            assert add is not None  # only then weights are cut so
            part = ops.layer.linear(x, layer)
            add(part)
            return part
        if not isinstance(layer, ShardedProjection):
            return ops.layer.linear(x, layer)
        whole = gather(x, layer.columns_of)
        return gather(ops.layer.linear(whole if layer.order is None else whole[:, layer.order], layer), layer.rows_of)

    layer_ops = replace(ops.layer, linear=linear, experts=_meeting(ops.layer.experts, gather))
    return LayerwiseDecoder(layer_ops, config, None, layers, final_norm, hidden_state_layers, out_dtype=out_dtype)


def _meeting(ops: ExpertOps, gather: Gather) -> ExpertOps:
    """Experts whose ranks meet before and after the product down."""

    def rows(x: torch.Tensor, layer: ExpertProjection) -> torch.Tensor:
        return ops.rows(gather(x, layer.columns_of) if isinstance(layer, ShardedExperts) else x, layer)

    def expert_linear(x: torch.Tensor, layer: ExpertProjection, groups: Groups, gathers: bool) -> torch.Tensor:
        out = ops.expert_linear(x, layer, groups, gathers)
        return gather(out, layer.rows_of) if isinstance(layer, ShardedExperts) else out

    return replace(ops, rows=rows, expert_linear=expert_linear)
