"""The two halves that the rows of a pass over pairs are made of: the token's embedding, and a hidden state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from specengine.ops.growth.row_inputs import join_rows
from specengine.ops.layerwise.decoder import LayerOps
from specengine.ops.row_tools import join_columns
from specengine.ops.weight import Projection, Weight

Norms = tuple[torch.Tensor | None, torch.Tensor | None]  # of embedding and hidden state; None: that half is not normed


class Halves(ABC):
    """Joins the halves of M rows."""

    def join(self, norms: Norms, reader: Projection) -> torch.Tensor:
        """Returns [M, 2 hidden] for a product, [embedding | hidden state]."""
        return self._joined(norms, reader, None)[1]

    def join_with_stream(self, norms: Norms, reader: Projection, normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden states float32 [M, hidden], normed or not, and the joined halves."""
        stream, joined = self._joined(norms, reader, normed)
        assert stream is not None  # asked for
        return stream, joined

    @abstractmethod
    def _joined(
        self, norms: Norms, reader: Projection, normed_stream: bool | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Returns both; without a stream where normed_stream is None."""


class HalvesByOps(Halves):
    """Joins by the ops of any device.

    embedded, hidden_states: float32 [M, hidden].  normed: applies a norm.
    """

    def __init__(
        self,
        embedded: torch.Tensor,
        hidden_states: torch.Tensor,
        normed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._embedded, self._hidden_states, self._normed = embedded, hidden_states, normed

    def _joined(
        self, norms: Norms, reader: Projection, normed_stream: bool | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        embedding_norm, hidden_state_norm = norms
        embedded, hidden_states = self._embedded, self._hidden_states
        if embedding_norm is not None:
            embedded = self._normed(embedded, embedding_norm)
        if hidden_state_norm is not None:
            hidden_states = self._normed(hidden_states, hidden_state_norm)
        return hidden_states if normed_stream else self._hidden_states, join_columns([embedded, hidden_states])


class HalvesInOneKernel(Halves):
    """Joins on CUDA, where rows of embedding and hidden states are found on the way.

    tokens: int32 [M].  hidden_states: float32 [R, hidden].  above: int64 [M], rows of these; None: they are in order.
    """

    def __init__(
        self,
        embedding: Weight,
        tokens: torch.Tensor,
        hidden_states: torch.Tensor,
        above: torch.Tensor | None,
        ops: LayerOps,
        eps: float,
    ) -> None:
        self._left = embedding.data
        self._ids: torch.Tensor | None = tokens
        if embedding.data.dtype == torch.uint8:  # coded: another op decodes its rows
            self._left = torch.empty(len(tokens), hidden_states.shape[1], device=hidden_states.device)
            ops.gather_rows(embedding, tokens, self._left)
            self._ids = None
        self._hidden_states, self._above, self._rows = hidden_states, above, len(tokens)
        self._ops, self._eps = ops, eps

    def _joined(
        self, norms: Norms, reader: Projection, normed_stream: bool | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        stream = None
        if normed_stream is not None:
            shape = (self._rows, self._hidden_states.shape[1])
            stream = torch.empty(shape, device=self._hidden_states.device)
        joined = join_rows(
            self._left,
            self._hidden_states,
            self._ops.dtype_for(reader),
            ids=self._ids,
            above=self._above,
            norms=norms,
            stream=stream,
            norms_stream=bool(normed_stream),
            eps=self._eps,
        )
        return stream, joined
