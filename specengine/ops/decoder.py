"""One pass of all decoder layers in one native call, on the CPU; layerwise_decoder.py has the pass op by op.

Shapes: M rows of a TreeBatch, B requests, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specengine import _C
from specengine.ops.experts.moe import ExpertProjection, Moe
from specengine.ops.gated_delta.matrices import NO_STATES, GatedDelta
from specengine.ops.lora.matrices import LoraLayer
from specengine.ops.weight import Projection, Weight
from specengine.utils.multipliers import PLAIN, Multipliers


class Rows(Protocol):
    """The part of a TreeBatch that a pass reads."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def depths(self) -> torch.Tensor: ...

    @property
    def row_start(self) -> torch.Tensor: ...

    @property
    def ancestors(self) -> torch.Tensor | None: ...


class DecoderSizes(Protocol):
    """The sizes of a model's layers; a ModelConfig has them."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def rotated(self) -> int: ...


_NOTHING = _C.Projection((), (), None, None, False)

Pass = Callable[..., Any]  # a Decoder's call: returns a tensor, or None if only the cache is written


@dataclass(frozen=True)
class Layer:
    """One decoder layer; q, k, v and gate, up are fused to one projection each. window: 0 for none.

    With an attention gate (Qwen3.5) each head of q in qkv is followed by its gate. gated_delta: in place of attention;
    qkv then makes q, k, v, z, b and a, and attention_out reads its rows.

    moe: its experts. Beside them gate_up and down are those of the shared expert, or None. sinks: see tree_attention.
    Only the first layer of a model may have no attention_norm.
    """

    attention_norm: torch.Tensor | None
    qkv: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_out: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection | None
    down: Projection | None
    window: int
    moe: Moe | None = None
    sinks: torch.Tensor | None = None
    gated_delta: GatedDelta | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its linear layers, without those of experts."""
        products = self.qkv, self.attention_out, self.gate_up, self.down
        return tuple(product for product in products if product is not None)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights of all its products, experts' among them."""
        experts = () if self.moe is None else (*self.moe.gate_up.weights, *self.moe.down.weights)
        return (*(weight for product in self.projections for weight in product.weights), *experts)


class Decoder:
    """The layers of a model on the CPU.

    hidden_state_layers: rising numbers of the layers whose input every pass writes; the number of layers stands for the
    last one's output.  first_columns: columns of first_inputs, from which the first layer makes q, k and v; such a
    layer has no norm of its own. 0: it makes them from the rows that enter.  lora: the adapters of each layer; empty:
    none.  multipliers: all but logits_divisor, which is the caller's. Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        config: DecoderSizes,
        embedding: Weight | None,
        layers: Sequence[Layer],
        final_norm: torch.Tensor,
        hidden_state_layers: Sequence[int] = (),
        first_columns: int = 0,
        lora: Sequence[LoraLayer] = (),
        multipliers: Multipliers = PLAIN,
    ) -> None:
        self._hidden = config.hidden_size
        self.native = _C.Decoder(
            embedding=None if embedding is None else embedding.data,
            layers=tuple(_native_layer(layer) for layer in layers),
            final_norm=final_norm,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            first_columns=first_columns,
            hidden_state_layers=tuple(hidden_state_layers),
            lora=tuple(layer.native for layer in lora),
            multipliers=_native(multipliers, config.head_dim),
            rotated=config.rotated,
        )

    def __call__(
        self,
        tree: Rows,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        at_layers: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
        first_inputs: torch.Tensor | None = None,
        first_node: int = 0,
        only_cache: bool = False,
        adapters: torch.Tensor | None = None,
        experts: torch.Tensor | None = None,
        states: _C.DeltaStates = NO_STATES,
    ) -> torch.Tensor | None:
        """Hidden states float32 [M, hidden] after the final norm; keys and values of a row go to slot length + node
        index.

        k_cache, v_cache: [layers, pages, K, PAGE_SIZE, D], of those with attention.  block_table: int32 [B, max_pages].
        lengths: int32 [B].  cos, sin: [positions, rotated / 2].  at_layers: float32 [M, hidden_state_layers, hidden],
        written; None if there are none.  inputs: float32 [M, hidden], the rows that enter the first layer in place of
        the tokens' embeddings.  first_inputs: float32 [M, first_columns], if the decoder has first_columns.
        first_node: the rows are nodes from this number on; earlier passes wrote keys and values of the nodes before.
        only_cache: writes nothing else.  adapters: int32 [B], the adapter of each request, -1: none; None: of no
        request.  experts: int32 [layers], written: how many experts each layer read.  states: of layers of gated delta
        rule, see ops.gated_delta.
        Raises ValueError if a slot has no page or a position no row in cos.
        """
        rows = len(tree.tokens)
        hidden_states = None if only_cache else torch.empty(rows, self._hidden)
        _C.decoder_pass(
            self.native,
            tree.tokens if inputs is None else None,
            inputs,
            first_inputs,
            tree.depths,
            tree.ancestors,
            _C.KVCacheView(k_cache, v_cache, block_table, lengths, tree.row_start, first_node),
            _C.RopeTables(cos, sin),
            _C.PassOutputs(hidden_states, at_layers, experts),
            torch.empty(self.native.workspace_bytes(rows), dtype=torch.uint8),
            adapters,
            states,
        )
        return hidden_states


def _native_layer(layer: Layer) -> _C.DecoderLayer:
    return _C.DecoderLayer(
        attention_norm=layer.attention_norm,
        qkv=native_projection(layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        attention_out=native_projection(layer.attention_out),
        mlp_norm=layer.mlp_norm,
        gate_up=_NOTHING if layer.gate_up is None else native_projection(layer.gate_up),
        down=_NOTHING if layer.down is None else native_projection(layer.down),
        window=layer.window,
        moe=() if layer.moe is None else (_native_experts(layer.moe),),
        sinks=layer.sinks,
        gated_delta=() if layer.gated_delta is None else (layer.gated_delta.native,),
    )


def _native_experts(moe: Moe) -> _C.MoeLayer:
    return _C.MoeLayer(
        router=moe.router,
        router_bias=moe.router_bias,
        shared_gate=moe.shared_gate,
        renormalise=moe.renormalise,
        per_token=moe.per_token,
        intermediate=moe.intermediate,
        gate_up=_native_expert_projection(moe.gate_up),
        down=_native_expert_projection(moe.down),
        swiglu_limit=moe.swiglu_limit,
        swiglu_alpha=moe.swiglu_alpha,
    )


def _native_expert_projection(layer: ExpertProjection) -> _C.ExpertProjection:
    return _C.ExpertProjection(tuple(w.data for w in layer.weights), layer.rows, layer.bias, layer.float_rows)


def native_projection(layer: Projection | None) -> _C.Projection:
    """The projection as the core takes it; the core borrows the weights and keeps them alive. None: it has none."""
    if layer is None:
        return _C.Projection((), (), None, None, False)
    weights, rows = tuple(w.data for w in layer.weights), tuple(w.rows for w in layer.weights)
    return _C.Projection(weights, rows, layer.bias, layer.columns, layer.float_rows)


def _native(factors: Multipliers, head_dim: int) -> _C.Multipliers:
    return _C.Multipliers(factors.embedding, factors.attention_scale(head_dim), factors.residual)
