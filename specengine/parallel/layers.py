"""The layers of one rank's part, with the sum over all ranks after attention and after the MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specengine.models.config import ModelConfig
from specengine.ops import Ops
from specengine.ops.decoder import Layer, LayerwiseDecoder
from specengine.ops.weight import Projection
from specengine.parallel.shards import Summand


def part_decoder(
    ops: Ops,
    total: Callable[[torch.Tensor], torch.Tensor],
    config: ModelConfig,
    layers: Sequence[Layer],
    final_norm: torch.Tensor,
    taps: Sequence[int] = (),
) -> LayerwiseDecoder:
    """Op by op, so that the ranks can meet in between; takes its rows as `inputs`.  total: the sum over all ranks."""

    def linear(x: torch.Tensor, layer: Projection) -> torch.Tensor:
        out = ops.layer.linear(x, layer)
        return total(out) if isinstance(layer, Summand) else out

    return LayerwiseDecoder(replace(ops.layer, linear=linear), config, None, layers, final_norm, taps)
