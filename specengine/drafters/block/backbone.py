"""The layers of a one-pass block drafter: the context enters them as keys and values only.

A context vector stands for a token that the target has read: fc of the target's hidden states, normed. Every layer
makes keys and values of it. The slots of a block, the anchor's and those of mask tokens, run through the layers and
attend to the context and to each other. Their own keys and values lie behind the context until the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specengine._C import KVCacheView
from specengine.cache.cache_batch import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.drafters.block.attention import BlockAttention
from specengine.drafters.block.convolution import Convolution, ConvolutionAt
from specengine.drafters.block.settings import BlockSettings
from specengine.drafters.hidden_states.pairs import PairRows
from specengine.models.config import ModelConfig
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.ops import Ops
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class BlockLayer:
    """One layer. q and kv make queries of slots, and keys and values of slots and of context vectors.

    attention_conv, mlp_conv: around attention and MLP (DFlash 2), or None.
    """

    attention_norm: torch.Tensor
    q: Projection
    kv: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_out: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None

    @property
    def qkv(self) -> Projection:
        """Queries, keys and values of slots in one product."""
        biases = [part.bias for part in (self.q, self.kv) if part.bias is not None]
        return Projection((*self.q.weights, *self.kv.weights), torch.cat(biases) if biases else None)

    @property
    def projections(self) -> list[Projection]:
        """Its linear layers."""
        convolutions = (self.attention_conv, self.mlp_conv)
        own = [self.q, self.kv, self.attention_out, self.gate_up, self.down]
        return own + [each.kernel for each in convolutions if each is not None]


@dataclass(frozen=True)
class BackboneParts:
    """What a backbone is made of. config: of its layers.  fc: of the target's hidden states side by side.

    context_norm, final_norm: float32 [hidden].
    """

    config: ModelConfig
    settings: BlockSettings
    layers: Sequence[BlockLayer]
    embedding: Weight
    fc: Projection
    context_norm: torch.Tensor
    final_norm: torch.Tensor
    target_size: int
    ops: Ops
    device: torch.device


class Slots(NamedTuple):
    """The slots of B blocks. tokens: int32 [B, size], masks.  depths: int32 [B size].  starts: int32 [B + 1]."""

    tokens: torch.Tensor
    depths: torch.Tensor
    starts: torch.Tensor


class Backbone:
    """Runs the layers of one drafter; a PairNetwork that reads hidden states and no tokens."""

    def __init__(self, parts: BackboneParts) -> None:
        self.config, self.settings = parts.config, parts.settings
        self.device = parts.device
        c, self._parts, self._ops, self._layer_ops = parts.config, parts, parts.ops, parts.ops.layer
        self.hidden_state_layers = tuple(sorted(set(parts.settings.features)))
        order = [self.hidden_state_layers.index(layer) for layer in parts.settings.features]
        # On the device: a list would be copied there, which no captured graph may do.
        rises = order == [*range(len(order))]
        self._order = None if rises else torch.tensor(order, device=parts.device)
        self._rope = RopeTables(c, parts.device)
        self._attention = BlockAttention(
            parts.ops.layer, c.num_heads, c.num_kv_heads, c.head_dim, parts.settings.block_size
        )
        self._qkv = [layer.qkv for layer in parts.layers]
        self._made: dict[int, Slots] = {}  # by blocks
        self._context_kv = _side_by_side([layer.kv for layer in parts.layers])

    @property
    def embedding(self) -> Weight:
        """Rows [V, hidden] of the slots' tokens."""
        return self._parts.embedding

    @property
    def projections(self) -> list[Projection]:
        """Its linear layers."""
        return [self._parts.fc, *(product for layer in self._parts.layers for product in layer.projections)]

    def pick(self, hidden_states: HiddenStates) -> torch.Tensor:
        """Returns those of the target's hidden states that it reads, float32 [M, hidden_state_layers, hidden]."""
        assert hidden_states.at_layers is not None  # its drafter has hidden_state_layers
        return hidden_states.at_layers

    def picked_shape(self, hidden_state_layers: int) -> tuple[int, ...]:
        """Returns the shape of one position of pick()."""
        return (hidden_state_layers, self._parts.target_size)

    @property
    def kept_dtype(self) -> torch.dtype:
        """fc reads them as they lie."""
        return self._layer_ops.dtype_for(self._parts.fc)

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)

    def cache_pairs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> None:
        """Caches the keys and values of context vectors, which are made of hidden states alone."""
        c, ops = self.config, self._layer_ops
        vectors = self._context(read.hidden_states)
        kv = self._ops.linear(vectors, self._context_kv)  # of all layers side by side
        rows, no_query = read.rows, torch.empty(len(vectors), 0, c.head_dim, device=self.device)
        for number, layer in enumerate(self._parts.layers):
            view = self._view(pool, number, place, rows.row_start)
            norms, first = (None, layer.k_norm), number * layer.kv.rows
            ops.rope_cache(kv, *self._rope.cos_sin, *norms, rows.depths, view, no_query, c.rms_norm_eps, first)

    def outputs(self, tokens: torch.Tensor, place: CacheBatch, pool: PagePool) -> torch.Tensor:
        """Returns the slots' outputs after the final norm, float32 [B, block_size, hidden].

        tokens: int32 [B, block_size].  place: lengths are those of the context, whose keys and values are cached.
        """
        c, ops, size = self.config, self._layer_ops, self.settings.block_size
        batch, rows = len(tokens), tokens.numel()
        slots, attention = self._slots(batch), self._attention.at(place)
        x = torch.empty(rows, c.hidden_size, device=self.device)
        q = torch.empty(rows, c.num_heads, c.head_dim, device=self.device)
        ops.gather_rows(self._parts.embedding, tokens.view(-1), x)
        if self.settings.embedding_scale != 1:
            x *= self.settings.embedding_scale
        delta = None
        for number, (layer, qkv, mask) in enumerate(
            zip(self._parts.layers, self._qkv, self.settings.masks, strict=True)
        ):
            normed, conv = self._entered(x, delta, layer.attention_norm, qkv, layer.attention_conv)
            made = self._ops.linear(normed, qkv)
            view = self._view(pool, number, place, slots.starts)
            norms = layer.q_norm, layer.k_norm
            ops.rope_cache(made, *self._rope.cos_sin, *norms, slots.depths, view, q, c.rms_norm_eps)
            attended = attention(q, pool.k[number], pool.v[number], mask, ops.dtype_for(layer.attention_out))
            delta = self._ops.linear(attended, layer.attention_out)
            delta = conv.after(delta) if conv else delta
            normed, conv = self._entered(x, delta, layer.mlp_norm, layer.gate_up, layer.mlp_conv)
            gated = torch.empty(rows, c.intermediate_size, dtype=ops.dtype_for(layer.down), device=self.device)
            ops.silu_mul(self._ops.linear(normed, layer.gate_up), gated)
            delta = self._ops.linear(gated, layer.down)
            delta = conv.after(delta) if conv else delta
        out = torch.empty_like(x)
        ops.rms_norm(x, delta, self._parts.final_norm, out, c.rms_norm_eps)
        return out.view(batch, size, -1)

    def block_tokens(self, batch: int) -> torch.Tensor:
        """Returns int32 [B, block_size], masks behind a first column that the caller sets; always the same tensor."""
        return self._slots(batch).tokens

    def _entered(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        norm: torch.Tensor,
        reader: Projection,
        convolution: Convolution | None,
    ) -> tuple[torch.Tensor, ConvolutionAt | None]:
        """Adds to the stream; returns what a sublayer reads, and its convolution if it has one."""
        dtype = torch.float32 if convolution else self._layer_ops.dtype_for(reader)
        normed = torch.empty_like(x, dtype=dtype)
        self._layer_ops.rms_norm(x, delta, norm, normed, self.config.rms_norm_eps)
        if convolution is None:
            return normed, None
        at = convolution.at(normed, self.settings.block_size)
        return at.before(normed), at

    def _slots(self, batch: int) -> Slots:
        """Returns what all passes of as many blocks share; made once, since captured graphs hold on to it."""
        if batch not in self._made:
            size = self.settings.block_size
            tokens = torch.full((batch, size), self.settings.mask_token, dtype=torch.int32, device=self.device)
            depths = torch.arange(size, dtype=torch.int32, device=self.device).repeat(batch)
            starts = torch.arange(0, batch * size + 1, size, dtype=torch.int32, device=self.device)
            self._made[batch] = Slots(tokens, depths, starts)
        return self._made[batch]

    def _context(self, picked: torch.Tensor) -> torch.Tensor:
        """Returns context vectors [M, hidden] of picked hidden states, as their product takes them."""
        if self._order is not None:
            picked = picked[:, self._order]
        fused = self._ops.linear(picked.flatten(1), self._parts.fc)
        out = torch.empty_like(fused, dtype=self._layer_ops.dtype_for(self._context_kv))
        self._layer_ops.rms_norm(fused, None, self._parts.context_norm, out, self.config.rms_norm_eps)
        return out

    @staticmethod
    def _view(pool: PagePool, number: int, place: CacheBatch, starts: torch.Tensor) -> KVCacheView:
        return KVCacheView(pool.k[number], pool.v[number], place.block_table, place.lengths, starts, 0)


def _side_by_side(parts: Sequence[Projection]) -> Projection:
    """Returns one projection of the rows of several; their weights are shared, not copied."""
    size = torch.cat([torch.zeros(part.rows) if part.bias is None else part.bias.cpu() for part in parts])
    biased = any(part.bias is not None for part in parts)
    bias = size.to(parts[0].weights[0].data.device) if biased else None
    return Projection(tuple(weight for part in parts for weight in part.weights), bias)
