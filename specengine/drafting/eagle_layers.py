"""The networks of EAGLE drafters: a decoder layer that goes on from the target's features (methods of EAGLE-1 to 3).

Row k reads a feature of position k and the embedding of token k + 1, at rotary position k. What comes out stands for
the feature of position k + 1 and is fed back where the target has not computed that yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine.drafting.features import Features
from specengine.kv_cache import PagePool
from specengine.models.config import ModelConfig
from specengine.models.rope import RopeTables
from specengine.ops import Ops
from specengine.ops.decoder import Layer
from specengine.ops.row_tools import join_columns, stack_rows, take_rows
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class Rows:
    """Where R rows of a pass stand. depths, ancestors, row_start: of a TreeBatch.  The next two: of a CacheBatch.

    Of a tree's earlier levels only keys and values are needed, and these are not in order of the cache: a pass keeps
    its rows of [q | k | v] and the next one lays them out again, `order` int64 [R] of kept and fresh rows, one after
    the other; fresh: int64 [N], the rows that are computed. Both None: all are.
    """

    depths: torch.Tensor
    ancestors: torch.Tensor | None
    row_start: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    order: torch.Tensor | None = None
    fresh: torch.Tensor | None = None


class EagleLayers(ABC):
    """Layers of one drafter, ready to run.

    fc: fuses features, see each kind; None where nothing is to be fused.
    window: attention reaches so many positions back, so that none is further away than in training.
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
        self.target_size = target_size
        self.ops, self.device, self.window = ops, device, config.max_position
        self._rope = RopeTables(config, device)

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)

    @property
    def projections(self) -> list[Projection]:
        """Every linear layer of a pass."""
        own = [self.head] if self.fc is None else [self.fc, self.head]
        return [*own, *(product for layer in self.layers for product in layer.projections)]

    def pick(self, features: Features) -> torch.Tensor:
        """Those of the target's features that it reads, [M, ..]."""
        return features.last

    def picked_shape(self, taps: int) -> tuple[int, ...]:
        """Of one position; taps: layers of the target whose input it reads."""
        return (taps, self.target_size) if taps else (self.target_size,)

    def fuse(self, picked: torch.Tensor) -> torch.Tensor:
        """float32 [M, hidden]: what was picked as a pass takes it."""
        return picked

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [M, Vd] of what forward() returned, or of some of its rows."""

    def feed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands for the features of rows of which forward() returned this."""
        return hidden

    @abstractmethod
    def _enter(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream [N, hidden], and what the first layer's q, k and v are made of."""

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        rows: Rows,
        pool: PagePool,
        *,
        kept: Sequence[torch.Tensor] | None = None,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """float32 [N, hidden] of N fresh rows, and [q | k | v] of kept and fresh rows per layer.

        tokens: int32 [N].  features: float32 [N, hidden], of fuse() or feed_back().  kept: what an earlier pass of
        these trees returned.  wanted: int64 [n], nothing is returned of the other fresh rows; there is nothing kept.
        """
        config, ops = self.config, self.ops.layer
        embedded = self._empty(len(tokens), config.hidden_size)
        ops.gather_rows(self.embedding, tokens, embedded)
        residual, attention_input = self._enter(features, embedded)
        delta, memory = None, []
        for number, layer in enumerate(self.layers):
            if number:
                attention_input = self._normed(residual, delta, layer.attention_norm, layer.qkv)
            qkv = ops.linear(attention_input, layer.qkv)
            memory.append(qkv if kept is None else stack_rows([kept[number], qkv]))
            q = self._cached(memory[-1], layer, rows, pool.k[number], pool.v[number])
            picked = rows.fresh
            if wanted is not None and number == len(self.layers) - 1:
                picked, residual, memory = wanted, take_rows(residual, wanted), [take_rows(x, wanted) for x in memory]
            if len(residual) == 0:
                return residual, memory
            attended = self._attended(q, layer, rows, pool.k[number], pool.v[number])
            attended = attended if picked is None else take_rows(attended, picked)
            delta = ops.linear(attended, layer.attention_out)
            normed = self._normed(residual, delta, layer.mlp_norm, layer.gate_up)
            gated = self._empty(len(residual), config.intermediate_size, reader=layer.down)
            ops.silu_mul(ops.linear(normed, layer.gate_up), gated)
            delta = ops.linear(gated, layer.down)
        return residual.add_(delta), memory

    def _cached(
        self, qkv: torch.Tensor, layer: Layer, rows: Rows, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Writes keys and values of all rows; returns their queries float32 [R, H, D]."""
        config, place = self.config, (rows.block_table, rows.lengths, rows.row_start)
        if rows.order is not None:
            qkv = take_rows(qkv, rows.order)
        q = self._empty(len(qkv), config.num_heads, config.head_dim)
        norms = (layer.q_norm, layer.k_norm)
        self.ops.layer.rope_cache(
            *(qkv, *self._rope.cos_sin, *norms, rows.depths, keys, values, *place, q, config.rms_norm_eps)
        )
        return q

    def _attended(
        self, q: torch.Tensor, layer: Layer, rows: Rows, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[R, H D] for the projection behind attention."""
        place = (rows.block_table, rows.lengths, rows.row_start)
        out = self._empty(*q.shape, reader=layer.attention_out)
        scale = self.config.head_dim**-0.5
        self.ops.layer.tree_attention(q, keys, values, *place, rows.ancestors, out, scale, self.window)
        return out.view(len(q), -1)

    def _empty(self, *shape: int, reader: Projection | None = None) -> torch.Tensor:
        dtype = reader.weights[0].data.dtype if reader and self.ops.layer.rounds else torch.float32
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _normed(
        self, residual: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor, reader: Projection | None = None
    ) -> torch.Tensor:
        """RMSNorm of the residual stream, to which delta is added first."""
        out = self._empty(*residual.shape, reader=reader)
        self.ops.layer.rms_norm(residual, delta, norm, out, self.config.rms_norm_eps)
        return out


class Eagle1Layers(EagleLayers):
    """EAGLE-1 and -2: embedding and last feature fused by one product, the target's head on what comes out.

    fc: [hidden, 2 hidden].
    """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(hidden, self.head)

    def _enter(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.ops.linear(join_columns([embedded, features]), self.fc)
        norm = self.layers[0].attention_norm
        return residual, residual if norm is None else self._normed(residual, None, norm, self.layers[0].qkv)


@dataclass(frozen=True)
class Eagle3Norms:
    """embedding, feature: of the halves of the first layer's input.  out: before the head.
    all_taps: of the features side by side before fc, each_tap: of each alone; most checkpoints have neither.
    before_residual: whether the residual stream is the normed feature.  feed_back: whether what is fed back is normed.
    """

    embedding: torch.Tensor
    feature: torch.Tensor
    out: torch.Tensor
    all_taps: torch.Tensor | None
    each_tap: tuple[torch.Tensor, ...]
    before_residual: bool
    feed_back: bool


class Eagle3Layers(EagleLayers):
    """EAGLE-3: features of several layers fused by fc; the first layer reads [embedding | feature], a head of its own.

    order: which tap each part of fc's columns reads.  fc: [hidden, parts target hidden]; None: the last feature enters.
    """

    def __init__(self, order: Sequence[int], norms: Eagle3Norms, fc: Projection | None, *args) -> None:
        super().__init__(fc, *args)
        self.order, self.norms = list(order), norms

    def pick(self, features: Features) -> torch.Tensor:
        return features.last if self.fc is None else features.tapped

    def fuse(self, picked: torch.Tensor) -> torch.Tensor:
        if self.fc is None:
            return picked
        taps = picked
        if self.order != list(range(taps.shape[1])):
            taps = taps[:, self.order]
        if self.norms.each_tap:
            parts = zip(taps.unbind(1), self.norms.each_tap, strict=True)
            taps = torch.stack([self._normed(part.contiguous(), None, norm) for part, norm in parts], dim=1)
        wide = taps.reshape(len(taps), -1)
        if self.norms.all_taps is not None:
            wide = self._normed(wide, None, self.norms.all_taps)
        return self.ops.linear(wide, self.fc)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(self._normed(hidden, None, self.norms.out, self.head), self.head)

    def feed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._normed(hidden, None, self.norms.out) if self.norms.feed_back else hidden

    def _enter(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._normed(features, None, self.norms.feature)
        halves = join_columns([self._normed(embedded, None, self.norms.embedding), normed])
        return normed if self.norms.before_residual else features.clone(), halves
