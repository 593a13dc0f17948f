"""The networks of EAGLE drafters: a decoder that goes on from the target's features (methods of EAGLE-1 to 3).

Row k reads a hidden state of position k and the embedding of token k + 1, at rotary position k. What comes out stands for
the hidden state of position k + 1 and is fed back where the target has not computed that yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.models.config import ModelConfig
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.ops import Ops
from specengine.ops.decoder import Decoder, Layer, Rows
from specengine.ops.draft_backbone import BackboneDraft, BackboneNetwork
from specengine.ops.row_tools import join_columns, take_rows
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class Outputs:
    """What a pass makes of its rows, float32 [M, hidden] both. read: by the head.  fed: back, in place of hidden states."""

    read: torch.Tensor
    fed: torch.Tensor

    def rows(self, picked: torch.Tensor) -> Outputs:
        """Some of them; picked: int64 [n]."""
        read = take_rows(self.read, picked)
        return Outputs(read, read if self.fed is self.read else take_rows(self.fed, picked))


class EagleLayers(ABC):
    """Layers of one drafter, ready to run.

    fc: fuses hidden states, see each kind; None where nothing is to be fused.
    """

    def __init__(
        self,
        fc: Projection | None,
        config: ModelConfig,
        layers: Sequence[Layer],
        embedding: Weight,
        head: Projection,
        target_size: int,
        ops: Ops,
        device: torch.device,
    ) -> None:
        self.fc, self.config, self.layers, self.embedding, self.head = fc, config, list(layers), embedding, head
        self.target_size, self.ops, self.device = target_size, ops, device
        self._rope = RopeTables(config, device)
        norm, columns = self._out_norm(), self._first_columns()
        self._decoder = ops.decoder(config, None, self.layers, norm, (config.num_layers,), columns)

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)

    def backbone_draft(self, vocabulary: torch.Tensor | None, top_k: int) -> BackboneDraft | None:
        """A whole draft of a backbone with leaves in one call, where there is one for it; vocabulary: of the head."""
        return None

    def backbone_features(self, picked: torch.Tensor) -> torch.Tensor:
        """float32 [M, columns]: what was picked as that draft takes it."""
        return self.fuse(picked)

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
        """Those of the target's hidden states that it reads, [M, ..]."""
        return hidden_states.last

    def picked_shape(self, hidden_state_layers: int) -> tuple[int, ...]:
        """Of one position; hidden_state_layers: layers of the target whose input it reads."""
        return (hidden_state_layers, self.target_size) if hidden_state_layers else (self.target_size,)

    def fuse(self, picked: torch.Tensor) -> torch.Tensor:
        """float32 [M, hidden]: what was picked as a pass takes it."""
        return picked

    def logits(self, read: torch.Tensor) -> torch.Tensor:
        """float32 [M, Vd] of outputs for the head."""
        return self.ops.linear(read, self.head)

    @abstractmethod
    def _out_norm(self) -> torch.Tensor:
        """Of the decoder."""

    def _first_columns(self) -> int:
        """Of the decoder."""
        return 0

    @abstractmethod
    def _enter(self, hidden_states: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream [M, hidden], and what the first layer's q, k and v are made of, if not of that."""

    @abstractmethod
    def _outputs(self, hidden: torch.Tensor, normed: torch.Tensor) -> Outputs:
        """Of the last layer's output and the decoder's norm of it."""

    def forward(
        self,
        rows: Rows,
        hidden_states: torch.Tensor,
        place: CacheBatch,
        pool: PagePool,
        *,
        first_node: int = 0,
    ) -> Outputs:
        """The outputs of M rows, once their keys and values are cached.

        hidden_states: float32 [M, hidden], of fuse() or fed back.  first_node: as a decoder takes it.
        """
        hidden = torch.empty(len(hidden_states), 1, self.config.hidden_size, device=self.device)
        return self._outputs(hidden.squeeze(1), self._decoded(rows, hidden_states, place, pool, hidden, first_node))

    def cache_only(self, rows: Rows, hidden_states: torch.Tensor, place: CacheBatch, pool: PagePool) -> None:
        """What a pass leaves in the cache, and nothing more."""
        self._decoded(rows, hidden_states, place, pool, None)

    def _decoded(
        self,
        rows: Rows,
        hidden_states: torch.Tensor,
        place: CacheBatch,
        pool: PagePool,
        hidden: torch.Tensor | None,
        first_node: int = 0,
    ) -> Any:
        """hidden: [M, 1, hidden], written: the last layer's output; None: only the cache is."""
        embedded = torch.empty(len(hidden_states), self.config.hidden_size, device=self.device)
        self.ops.layer.gather_rows(self.embedding, rows.tokens, embedded)
        inputs, first_inputs = self._enter(hidden_states, embedded)
        cache = (pool.k, pool.v, place.block_table, place.lengths)
        return self._decoder(
            rows, *cache, *self._rope.cos_sin, hidden, inputs, first_inputs, first_node, hidden is None
        )

    def _normed(self, rows: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rows)
        self.ops.layer.rms_norm(rows, None, norm, out, self.config.rms_norm_eps)
        return out


class Eagle1Layers(EagleLayers):
    """EAGLE-1 and -2: embedding and last hidden state fused by one product, the target's head on what comes out.

    fc: [hidden, 2 hidden].
    """

    def _out_norm(self) -> torch.Tensor:
        return torch.ones(self.config.hidden_size, device=self.device)  # of what nobody reads

    def _enter(self, hidden_states: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.ops.linear(join_columns([embedded, hidden_states]), self.fc), None

    def _outputs(self, hidden: torch.Tensor, normed: torch.Tensor) -> Outputs:
        return Outputs(hidden, hidden)


@dataclass(frozen=True)
class Eagle3Norms:
    """embedding, feature: of the halves of the first layer's input.  out: before the head.
    all_taps: of the hidden states side by side before fc, each_tap: of each alone; most checkpoints have neither.
    before_residual: whether the residual stream is the normed hidden state.  feed_back: whether what is fed back is normed.
    """

    embedding: torch.Tensor
    feature: torch.Tensor
    out: torch.Tensor
    all_taps: torch.Tensor | None
    each_tap: tuple[torch.Tensor, ...]
    before_residual: bool
    feed_back: bool


class Eagle3Layers(EagleLayers):
    """EAGLE-3: hidden states of several layers fused by fc; the first layer reads [embedding | hidden state], a head of its own.

    order: which tap each part of fc's columns reads.  fc: [hidden, parts target hidden]; None: the last hidden state enters.
    """

    def __init__(
        self,
        order: Sequence[int],
        norms: Eagle3Norms,
        fc: Projection | None,
        config: ModelConfig,
        layers: Sequence[Layer],
        *rest,
    ) -> None:
        self.order, self.norms = list(order), norms
        # the tensor of that name is the embedding's norm, and the first layer reads two normed halves
        super().__init__(fc, config, [replace(layers[0], attention_norm=None), *layers[1:]], *rest)

    def pick(self, hidden_states: HiddenStates) -> torch.Tensor:
        if self.fc is None:
            return hidden_states.last
        assert hidden_states.at_layers is not None  # its drafter has hidden_state_layers
        return hidden_states.at_layers

    def fuse(self, picked: torch.Tensor) -> torch.Tensor:
        if self.fc is None:
            return picked
        hidden_state_layers = picked
        if self.order != list(range(hidden_state_layers.shape[1])):
            hidden_state_layers = hidden_state_layers[:, self.order]
        if self.norms.each_tap:
            parts = zip(hidden_state_layers.unbind(1), self.norms.each_tap, strict=True)
            hidden_state_layers = torch.stack([self._normed(part.contiguous(), norm) for part, norm in parts], dim=1)
        wide = hidden_state_layers.reshape(len(hidden_state_layers), -1)
        if self.norms.all_taps is not None:
            wide = self._normed(wide, self.norms.all_taps)
        return self.ops.linear(wide, self.fc)

    def backbone_features(self, picked: torch.Tensor) -> torch.Tensor:
        return picked.flatten(1) if self._fuses_alone else self.fuse(picked)

    @property
    def _fuses_alone(self) -> bool:
        """Whether fc takes what was picked as it lies."""
        plain = self.norms.all_taps is None and not self.norms.each_tap
        return self.fc is not None and plain and self.order == list(range(len(self.order)))

    def _out_norm(self) -> torch.Tensor:
        return self.norms.out

    def _first_columns(self) -> int:
        return 2 * self.config.hidden_size

    def backbone_draft(self, vocabulary: torch.Tensor | None, top_k: int) -> BackboneDraft | None:
        if not isinstance(self._decoder, Decoder):
            return None
        own, fuse = self.norms, self.fc if self._fuses_alone else None
        norms = (own.embedding, own.feature, fuse, own.before_residual, own.feed_back)
        return BackboneDraft(BackboneNetwork(self._decoder, self.embedding, *norms, self.head, vocabulary), top_k)

    def _enter(self, hidden_states: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed = self._normed(hidden_states, self.norms.feature)
        halves = join_columns([self._normed(embedded, self.norms.embedding), normed])
        return normed if self.norms.before_residual else hidden_states, halves

    def _outputs(self, hidden: torch.Tensor, normed: torch.Tensor) -> Outputs:
        return Outputs(normed, normed if self.norms.feed_back else hidden)
