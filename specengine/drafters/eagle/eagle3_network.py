"""EAGLE-3's network: fused hidden states of several layers, and a head of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specengine import _C
from specengine.drafters.eagle.network import EagleNetwork, EagleParts, Outputs
from specengine.drafters.hidden_states.halves import Halves
from specengine.models.hidden_states import HiddenStates
from specengine.ops.decoder import Decoder, native_projection
from specengine.ops.row_tools import take_rows
from specengine.ops.weight import Projection


@dataclass(frozen=True)
class Eagle3Norms:
    """The norms of EAGLE-3.

    embedding, hidden_state: of the halves of the first layer's input.  out: before the head.
    all_layers: of the hidden states side by side before fc.  each_layer: of each alone. Most checkpoints have neither.
    before_residual: whether the residual stream is the normed hidden state.
    feed_back: whether the output that is fed back is normed.
    """

    embedding: torch.Tensor
    hidden_state: torch.Tensor
    out: torch.Tensor
    all_layers: torch.Tensor | None
    each_layer: tuple[torch.Tensor, ...]
    before_residual: bool
    feed_back: bool


class Eagle3Network(EagleNetwork):
    """Fuses hidden states of several layers by fc; the first layer reads [embedding | hidden state].

    order: the hidden state that each part of fc's columns reads.
    fc: [hidden, parts target hidden]; None: the last hidden state enters.
    """

    def __init__(self, order: Sequence[int], norms: Eagle3Norms, fc: Projection | None, parts: EagleParts) -> None:
        self.order = list(order)
        self.norms = norms
        self._layer_norms = torch.cat(norms.each_layer) if norms.each_layer else None
        rises = self.order == list(range(len(order)))
        # On the device: a list would be copied there, which no captured graph may do.
        self._order = None if rises else torch.tensor(self.order, device=parts.device)
        plain = norms.all_layers is None and not norms.each_layer and rises
        self._fuses_alone = fc is not None and plain  # fc takes picked hidden states as they lie
        # A checkpoint's attention norm of the first layer is the embedding's norm: the layer reads two normed halves.
        first, *others = parts.layers
        super().__init__(fc, replace(parts, layers=[replace(first, attention_norm=None), *others]))

    def pick(self, hidden_states: HiddenStates) -> torch.Tensor:
        if self.fc is None:
            return hidden_states.normed
        assert hidden_states.at_layers is not None  # its drafter has hidden_state_layers
        return hidden_states.at_layers

    @property
    def kept_dtype(self) -> torch.dtype:
        return self.ops.layer.dtype_for(self.fc) if self._fuses_alone and self.fc is not None else torch.float32

    def fuse(self, picked: torch.Tensor) -> torch.Tensor:
        if self.fc is None:
            return picked
        if self._order is not None:
            picked = picked[:, self._order]
        return self.fuse_in_order(picked)

    def fuse_in_order(self, picked: torch.Tensor) -> torch.Tensor:
        """Returns hidden states [M, parts, target hidden], in the order of fc's columns, as a pass takes them."""
        assert self.fc is not None
        if (norms := self._layer_norms) is not None:
            dtype = torch.float32 if self.norms.all_layers is not None else self.ops.layer.dtype_for(self.fc)
            picked = self._normed(picked.flatten(0, 1), norms, dtype).view(picked.shape)
        wide = picked.flatten(1)
        if self.norms.all_layers is not None:
            wide = self._normed(wide, self.norms.all_layers, self.ops.layer.dtype_for(self.fc))
        return self.ops.linear(wide, self.fc)

    def native_rows(self, picked: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        if self.fc is None or self._fuses_alone:
            return picked, rows
        return self.fuse(take_rows(picked, rows)), range(len(rows))

    def _out_norm(self) -> torch.Tensor:
        return self.norms.out

    def _out_dtype(self) -> torch.dtype:
        return torch.float32 if self.norms.feed_back else self.ops.layer.dtype_for(self.head)

    def _first_columns(self) -> int:
        return 2 * self.config.hidden_size

    def _weights(self, decoder: Decoder, vocabulary: torch.Tensor | None) -> _C.EagleWeights:
        norms = self.norms
        return _C.EagleWeights(
            decoder.native,
            self.embedding.data,
            norms.embedding,
            norms.hidden_state,
            native_projection(self.fc if self._fuses_alone else None),
            norms.before_residual,
            norms.feed_back,
            native_projection(self.head),
            vocabulary,
        )

    def _enter(self, halves: Halves) -> tuple[torch.Tensor, torch.Tensor | None]:
        norms, reader = (self.norms.embedding, self.norms.hidden_state), self.layers[0].qkv
        return halves.join_with_stream(norms, reader, self.norms.before_residual)

    def _outputs(self, hidden: torch.Tensor, normed: torch.Tensor) -> Outputs:
        return Outputs(normed, normed if self.norms.feed_back else hidden)
