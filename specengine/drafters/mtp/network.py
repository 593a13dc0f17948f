"""The network of multi-token prediction in Qwen's checkpoints: EAGLE-1's, with a norm on each half and one behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import _C
from specengine.drafters.eagle.network import EagleNetwork, EagleParts, Outputs
from specengine.drafters.hidden_states.halves import Halves
from specengine.ops.decoder import Decoder, native_projection
from specengine.ops.weight import Projection


@dataclass(frozen=True)
class MtpNorms:
    """The norms, float32 [hidden] each. embedding, hidden_state: before fc.  out: behind the layer."""

    embedding: torch.Tensor
    hidden_state: torch.Tensor
    out: torch.Tensor


class MtpNetwork(EagleNetwork):
    """Fuses normed embedding and normed hidden state by one product; the target's head reads the normed output.

    The normed output is fed back too: it stands for the target's hidden state, which is normed as well.
    fc: [hidden, 2 hidden].
    """

    rare = 0.0

    def __init__(self, norms: MtpNorms, fc: Projection, parts: EagleParts) -> None:
        self.norms = norms
        super().__init__(fc, parts)

    def _weights(self, decoder: Decoder, vocabulary: torch.Tensor | None) -> _C.EagleWeights:
        norms, fuse, head = self.norms, native_projection(self.fc), native_projection(self.head)
        halves = (norms.embedding, norms.hidden_state, fuse)
        return _C.EagleWeights(decoder.native, self.embedding.data, *halves, False, True, head, vocabulary)

    def _out_norm(self) -> torch.Tensor:
        return self.norms.out

    def _enter(self, halves: Halves) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.fc is not None  # its checkpoint has one
        joined = halves.join((self.norms.embedding, self.norms.hidden_state), self.fc)
        return self.ops.linear(joined, self.fc), None

    def _outputs(self, hidden: torch.Tensor, normed: torch.Tensor) -> Outputs:
        return Outputs(normed, normed)
