"""What the networks of EAGLE drafters share: a decoder that goes on from the target's hidden states.

Row k reads a hidden state of position k and the embedding of token k + 1, at rotary position k. Its output stands for
the hidden state of position k + 1. It is fed back where the target has not computed that hidden state yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specengine import _C
from specengine.cache.kv_cache import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.drafters.growth import Opened, Steps
from specengine.drafters.hidden_states.halves import Halves, HalvesByOps, HalvesInOneKernel
from specengine.drafters.hidden_states.pairs import PairRows
from specengine.drafters.native import NativeDraft
from specengine.models.config import ModelConfig
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.ops import Ops
from specengine.ops.decoder import Decoder, Layer, Rows
from specengine.ops.growth.growing_trees import Logits
from specengine.ops.row_tools import take_rows
from specengine.ops.weight import Projection, Weight

RARE = 0.01  # a node that is reached less often is not worth its row


@dataclass(frozen=True)
class Outputs:
    """The outputs of a pass, [M, hidden] each.

    read: by the head.  fed: float32, back in place of hidden states.
    """

    read: torch.Tensor
    fed: torch.Tensor


@dataclass(frozen=True)
class EagleParts:
    """What every EAGLE network is made of. target_size: the target's hidden size."""

    config: ModelConfig
    layers: Sequence[Layer]
    embedding: Weight
    head: Projection
    target_size: int
    ops: Ops
    device: torch.device


class EagleNetwork(ABC):
    """Runs the layers of one drafter.

    fc: fuses hidden states, see each kind; None where there is nothing to fuse.
    rare: a native draft leaves out nodes that are reached less often.
    """

    rare = RARE

    def __init__(self, fc: Projection | None, parts: EagleParts) -> None:
        self.fc = fc
        self.config = parts.config
        self.layers = list(parts.layers)
        self.embedding, self.head = parts.embedding, parts.head
        self.target_size = parts.target_size
        self.ops, self.device = parts.ops, parts.device
        self._on_device = parts.ops.on_device
        self._rope = RopeTables(parts.config, parts.device)
        last = (parts.config.num_layers,)
        rounded = {"out_dtype": self._out_dtype()} if self._on_device else {}
        form = self._out_norm(), last, self._first_columns()
        self._decoder = self.ops.decoder(self.config, None, self.layers, *form, **rounded)

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)

    def native_draft(self, vocabulary: torch.Tensor | None, shape: _C.GrowthShape) -> NativeDraft | None:
        """Returns a whole draft as one call of the core, or None where there is no such call.

        vocabulary: of the head.
        """
        if not isinstance(self._decoder, Decoder):
            return None
        return NativeDraft(self._weights(self._decoder, vocabulary), shape, self.rare)

    def native_rows(self, picked: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        """Returns rows of picked hidden states as that draft takes them: float32 [R, ..] and rows of these."""
        return picked, rows

    @property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary tables."""
        return self._rope.cos_sin

    @property
    def projections(self) -> list[Projection]:
        """Every linear layer of a pass."""
        own = [self.head] if self.fc is None else [self.fc, self.head]
        return [*own, *(product for layer in self.layers for product in layer.projections)]

    def pick(self, hidden_states: HiddenStates) -> torch.Tensor:
        """Returns those of the target's hidden states that it reads, [M, ..]."""
        return hidden_states.normed

    def picked_shape(self, hidden_state_layers: int) -> tuple[int, ...]:
        """Returns the shape of one position of pick(), where the target gives the input of so many layers."""
        return (hidden_state_layers, self.target_size) if hidden_state_layers else (self.target_size,)

    @property
    def kept_dtype(self) -> torch.dtype:
        """In which captured cycles may keep them."""
        return torch.float32

    def fuse(self, picked: torch.Tensor) -> torch.Tensor:
        """Returns picked hidden states as a pass takes them, float32 [M, hidden]."""
        return picked

    def logits(self, read: torch.Tensor) -> torch.Tensor:
        """Returns float32 [M, Vd] of outputs for the head."""
        return self.ops.linear(read, self.head)

    @abstractmethod
    def _weights(self, decoder: Decoder, vocabulary: torch.Tensor | None) -> _C.EagleWeights:
        """Returns the weights as the core takes them."""

    @abstractmethod
    def _out_norm(self) -> torch.Tensor:
        """Returns the decoder's last norm."""

    def _out_dtype(self) -> torch.dtype:
        """Returns the dtype of the rows of that norm on CUDA; rows that are fed back are float32."""
        return torch.float32

    def _first_columns(self) -> int:
        """Returns the columns of the first layer's input; 0: the hidden size."""
        return 0

    @abstractmethod
    def _enter(self, halves: Halves) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the residual stream [M, hidden], and the first layer's input where it is another."""

    @abstractmethod
    def _outputs(self, hidden: torch.Tensor, normed: torch.Tensor) -> Outputs:
        """Returns the outputs, of the last layer's output and the decoder's norm of it."""

    def draft(self, opened: Opened, levels: int) -> Steps:
        """Reads the pairs; then goes on from its own outputs, level by level."""
        outputs = self.forward(opened.rows, self.fuse(opened.pairs), opened.place, opened.pool)
        rows = yield Logits(self.logits(take_rows(outputs.read, opened.last)))
        while True:
            place = (opened.root_place, opened.pool, rows.first_node, None if rows.in_place else rows.above)
            outputs = self.forward(rows, outputs.fed, *place)
            rows = yield Logits(self.logits(outputs.read))

    def block_tokens(self, batch: int) -> None:
        """Returns None: it has no blocks."""
        return None

    def forward(
        self,
        rows: Rows,
        hidden_states: torch.Tensor,
        place: CacheBatch,
        pool: PagePool,
        first_node: int = 0,
        above: torch.Tensor | None = None,
    ) -> Outputs:
        """Caches the keys and values of M rows; returns their outputs.

        hidden_states: float32 [R, hidden], of fuse() or fed back.  first_node: as a decoder takes it.
        above: int64 [M], the row of hidden_states that each row reads; None: they are in order.
        """
        hidden, normed = self._decoded(rows, hidden_states, place, pool, first_node=first_node, above=above)
        return self._outputs(hidden, normed)

    def cache_pairs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> None:
        """Caches the keys and values of pairs, and computes nothing beyond."""
        self._decoded(read.rows, self.fuse(read.hidden_states), place, pool, only_cache=True)

    def _decoded(
        self,
        rows: Rows,
        hidden_states: torch.Tensor,
        place: CacheBatch,
        pool: PagePool,
        *,
        first_node: int = 0,
        above: torch.Tensor | None = None,
        only_cache: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        """Runs the decoder; returns the last layer's output float32 [M, hidden], and the norm of it.

        only_cache: only the cache is written.
        """
        count = len(rows.tokens)
        cache = (pool.k, pool.v, place.block_table, place.lengths, *self._rope.cos_sin)
        if self._on_device:
            eps = self.config.rms_norm_eps
            halves: Halves = HalvesInOneKernel(self.embedding, rows.tokens, hidden_states, above, self.ops.layer, eps)
            inputs, first_inputs = self._enter(halves)
            hidden = inputs[:, None]  # is overwritten layer by layer
            return inputs, self._decoder(rows, *cache, hidden, hidden, first_inputs, first_node, only_cache)
        embedded = torch.empty(count, self.config.hidden_size, device=self.device)
        self.ops.layer.gather_rows(self.embedding, rows.tokens, embedded)
        if above is not None:
            hidden_states = take_rows(hidden_states, above)
        inputs, first_inputs = self._enter(HalvesByOps(embedded, hidden_states, self._normed))
        hidden = torch.empty(count, 1, self.config.hidden_size, device=self.device)
        written = None if only_cache else hidden
        return hidden.squeeze(1), self._decoder(rows, *cache, written, inputs, first_inputs, first_node, only_cache)

    def _normed(self, rows: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.empty_like(rows, dtype=dtype)
        self.ops.layer.rms_norm(rows, None, norm, out, self.config.rms_norm_eps)
        return out
