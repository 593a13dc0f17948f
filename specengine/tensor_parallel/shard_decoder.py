"""The decoder of one rank: its part of every layer, with a gather where it needs the other ranks' columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specengine.models.config import ModelConfig
from specengine.ops import Ops
from specengine.ops.decoder import Layer
from specengine.ops.layerwise_decoder import LayerwiseDecoder
from specengine.ops.weight import Projection
from specengine.tensor_parallel.shards import ShardedProjection

Gather = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def shard_decoder(
    ops: Ops,
    gather: Gather,
    config: ModelConfig,
    layers: Sequence[Layer],
    final_norm: torch.Tensor,
    hidden_state_layers: Sequence[int] = (),
) -> LayerwiseDecoder:
    """Makes a decoder that runs op by op, so that the ranks can meet in between; it reads its rows from `inputs`.

    gather: puts all ranks' x side by side, given a rank's own x and the columns of each rank.
    """

    def linear(x: torch.Tensor, layer: Projection) -> torch.Tensor:
        if not isinstance(layer, ShardedProjection):
            return ops.layer.linear(x, layer)
        return gather(ops.layer.linear(gather(x, layer.columns_of), layer), layer.rows_of)

    return LayerwiseDecoder(replace(ops.layer, linear=linear), config, None, layers, final_norm, hidden_state_layers)
