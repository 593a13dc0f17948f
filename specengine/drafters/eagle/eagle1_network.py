"""EAGLE-1's network, which EAGLE-2 keeps."""

from __future__ import annotations

import torch

from specengine import _C
from specengine.drafters.eagle.network import EagleNetwork, Outputs
from specengine.drafters.hidden_states.halves import Halves
from specengine.ops.decoder import Decoder, native_projection


class Eagle1Network(EagleNetwork):
    """Fuses embedding and last hidden state by one product; the target's head reads the output.

    fc: [hidden, 2 hidden].
    """

    def _weights(self, decoder: Decoder, vocabulary: torch.Tensor | None) -> _C.EagleWeights:
        fuse, head = native_projection(self.fc), native_projection(self.head)
        return _C.EagleWeights(decoder.native, self.embedding.data, None, None, fuse, False, False, head, vocabulary)

    def _out_norm(self) -> torch.Tensor:
        return torch.ones(self.config.hidden_size, device=self.device)  # its result is never read

    def _enter(self, halves: Halves) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.fc is not None  # its checkpoint has one
        return self.ops.linear(halves.join((None, None), self.fc), self.fc), None

    def _outputs(self, hidden: torch.Tensor, normed: torch.Tensor) -> Outputs:
        return Outputs(hidden, hidden)
