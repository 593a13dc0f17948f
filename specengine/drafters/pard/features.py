"""PARD-2 adds the target's features to the embeddings: hidden states of several layers, projected and scaled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.row_tools import join_columns, scaled
from specengine.ops.weight import Projection


class TargetFeatures:
    """Turns the target's hidden states into what is added to embeddings.

    order: of the projection's columns: layers of the target whose input they read; the number of layers stands for the
    state behind the final norm.
    """

    def __init__(self, order: Sequence[int], projection: Projection, scale: float, target: Transformer) -> None:
        self._order, self._scale = list(order), scale
        self._last = target.config.num_layers
        self._linear = target.ops.linear
        self.projection = projection
        self.hidden_state_layers = tuple(sorted({layer for layer in order if layer != self._last}))

    def __call__(self, hidden_states: HiddenStates) -> torch.Tensor:
        """Returns float32 [M, hidden] of the drafter."""
        parts = []
        for layer in self._order:
            if layer == self._last:
                parts.append(hidden_states.last)
            else:
                assert hidden_states.at_layers is not None  # the drafter has hidden_state_layers
                parts.append(hidden_states.at_layers[:, self.hidden_state_layers.index(layer)])
        return scaled(self._linear(join_columns(parts), self.projection), self._scale)
