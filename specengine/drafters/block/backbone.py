"""The layers of a one-pass block drafter: the context enters them as keys and values only.

A context vector stands for a token that the target has read: fc of the target's hidden states, normed. Every layer
makes keys and values of it. The slots of a block, the anchor's and those of mask tokens, run through the layers and
attend to the context and to each other. Their own keys and values lie behind the context until the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine._C import KVCacheView
from specengine.cache.cache_batch import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.drafters.block.attention import BlockAttention
from specengine.drafters.block.convolution import Convolution
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

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)

    def cache_pairs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> None:
        """Caches the keys and values of context vectors, which are made of hidden states alone."""
        c, ops = self.config, self._layer_ops
        vectors = self._context(read.hidden_states)
        kv = self._ops.linear(vectors, self._context_kv).view(len(vectors), len(self._parts.layers), -1)
        rows, no_query = read.rows, torch.empty(len(vectors), 0, c.head_dim, device=self.device)
        for number, layer in enumerate(self._parts.layers):
            view = self._view(pool, number, place, rows.row_start)
            own = kv[:, number].contiguous()
            ops.rope_cache(own, *self._rope.cos_sin, None, layer.k_norm, rows.depths, view, no_query, c.rms_norm_eps)

    def outputs(self, tokens: torch.Tensor, place: CacheBatch, pool: PagePool) -> torch.Tensor:
        """Returns the slots' outputs after the final norm, float32 [B, block_size, hidden].

        tokens: int32 [B, block_size].  place: lengths are those of the context, whose keys and values are cached.
        """
        c, ops, size = self.config, self._layer_ops, self.settings.block_size
        batch, rows = len(tokens), tokens.numel()
        depths = torch.arange(size, dtype=torch.int32, device=self.device).repeat(batch)
        starts = torch.arange(0, rows + 1, size, dtype=torch.int32, device=self.device)
        x, normed = (torch.empty(rows, c.hidden_size, device=self.device) for _ in range(2))
        q = torch.empty(rows, c.num_heads, c.head_dim, device=self.device)
        ops.gather_rows(self._parts.embedding, tokens.flatten().contiguous(), x)
        if self.settings.embedding_scale != 1:
            x *= self.settings.embedding_scale
        delta = None
        for number, (layer, qkv, mask) in enumerate(
            zip(self._parts.layers, self._qkv, self.settings.masks, strict=True)
        ):
            ops.rms_norm(x, delta, layer.attention_norm, normed, c.rms_norm_eps)
            conv = layer.attention_conv and layer.attention_conv.at(normed, size)
            made = self._ops.linear(conv.before(normed) if conv else normed, qkv)
            view = self._view(pool, number, place, starts)
            norms = layer.q_norm, layer.k_norm
            ops.rope_cache(made, *self._rope.cos_sin, *norms, depths, view, q, c.rms_norm_eps)
            attended = self._attention(q, pool.k[number], pool.v[number], place, mask)
            delta = self._ops.linear(attended, layer.attention_out)
            delta = conv.after(delta) if conv else delta
            ops.rms_norm(x, delta, layer.mlp_norm, normed, c.rms_norm_eps)
            conv = layer.mlp_conv and layer.mlp_conv.at(normed, size)
            gated = torch.empty(rows, c.intermediate_size, device=self.device)
            ops.silu_mul(self._ops.linear(conv.before(normed) if conv else normed, layer.gate_up), gated)
            delta = self._ops.linear(gated, layer.down)
            delta = conv.after(delta) if conv else delta
        ops.rms_norm(x, delta, self._parts.final_norm, normed, c.rms_norm_eps)
        return normed.view(batch, size, -1)

    def _context(self, picked: torch.Tensor) -> torch.Tensor:
        """Returns context vectors float32 [M, hidden] of picked hidden states."""
        if self._order is not None:
            picked = picked[:, self._order]
        fused = self._ops.linear(picked.reshape(len(picked), -1), self._parts.fc)
        out = torch.empty_like(fused)
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
