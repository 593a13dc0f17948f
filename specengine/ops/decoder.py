"""One pass of all decoder layers: one native call on the CPU, elsewhere the same ops one by one.

Shapes: M rows of a TreeBatch, B requests, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specengine import _C
from specengine.models.config import ModelConfig
from specengine.ops.weight import Projection, Weight


class Rows(Protocol):
    """What a pass reads of a TreeBatch."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def depths(self) -> torch.Tensor: ...

    @property
    def row_start(self) -> torch.Tensor: ...

    @property
    def ancestors(self) -> torch.Tensor | None: ...


Pass = Callable[..., Any]  # a Decoder's call: a tensor, but None where only the cache is written


@dataclass(frozen=True)
class Layer:
    """One decoder layer; q, k, v and gate, up are fused to one projection each. window: 0 for none.

    Only the first layer of a model may have no attention_norm.
    """

    attention_norm: torch.Tensor | None
    qkv: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_out: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection
    window: int

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.attention_out, self.gate_up, self.down


class Decoder:
    """The layers of a model on the CPU.

    hidden_state_layers: rising numbers of layers whose input is wanted of every pass; the number of layers: the last one's output.
    first_columns: of rows that every pass is given for q, k and v of the first layer, which has no norm of its own; 0:
    they are made of the rows that enter. Raises ValueError for others.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Weight | None,
        layers: Sequence[Layer],
        final_norm: torch.Tensor,
        hidden_state_layers: Sequence[int] = (),
        first_columns: int = 0,
    ) -> None:
        self._hidden = config.hidden_size
        self.native = _C.Decoder(
            embedding=None if embedding is None else embedding.data,
            layers=tuple(_native_layer(layer) for layer in layers),  # kept alive by the core, which borrows the tensors
            final_norm=final_norm,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            first_columns=first_columns,
            hidden_state_layers=tuple(hidden_state_layers),
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
    ) -> torch.Tensor | None:
        """HiddenStates float32 [M, hidden], after the final norm; keys and values of row r go to slot length + node index.

        k_cache, v_cache: [layers, pages, K, PAGE_SIZE, D].  block_table: int32 [B, max_pages].  lengths: int32 [B].
        cos, sin: [positions, D/2].  at_layers: float32 [M, hidden_state_layers, hidden], written where there are hidden_state_layers.
        inputs: float32 [M, hidden], the rows that enter the first layer instead of the tokens' embeddings.
        first_inputs: float32 [M, first_columns], of a decoder that has them.  first_node: the rows are nodes from this
        number on, and passes before wrote keys and values of the nodes before.  only_cache: nothing else is written.
        Raises ValueError where a slot has no page or a position no row in cos.
        """
        rows = len(tree.tokens)
        hidden_states = None if only_cache else torch.empty(rows, self._hidden)
        _C.decoder_pass(
            *(
                self.native,
                tree.tokens if inputs is None else None,
                inputs,
                first_inputs,
                tree.depths,
                tree.ancestors,
                k_cache,
                v_cache,
                block_table,
                lengths,
            ),
            *(tree.row_start, cos, sin, hidden_states, at_layers),
            torch.empty(self.native.workspace_bytes(rows), dtype=torch.uint8),
            first_node,
        )
        return hidden_states


@dataclass(frozen=True)
class LayerOps:
    """What a layer is made of; each field has the signature of the function of its name in specengine.ops.

    rounds: rows between two ops are of the type of the weight that reads them, else float32.
    """

    gather_rows: Callable[..., None]
    rms_norm: Callable[..., None]
    linear: Callable[..., torch.Tensor]
    rope_cache: Callable[..., None]
    tree_attention: Callable[..., None]
    silu_mul: Callable[..., None]
    rounds: bool


class LayerwiseDecoder:
    """The layers of a model, op by op, on any device: a captured graph has no use for one call per pass."""

    def __init__(
        self,
        ops: LayerOps,
        config: ModelConfig,
        embedding: Weight | None,
        layers: Sequence[Layer],
        final_norm: torch.Tensor,
        hidden_state_layers: Sequence[int] = (),
        first_columns: int = 0,
    ) -> None:
        self.ops, self.config, self.hidden_state_layers = ops, config, tuple(hidden_state_layers)
        self.embedding, self.layers, self.final_norm = embedding, layers, final_norm

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
    ) -> torch.Tensor | None:
        """As Decoder; the caller answers for slots and positions."""
        c, ops, rows = self.config, self.ops, len(tree.tokens)

        def empty(*shape: int, reader: Projection | None = None) -> torch.Tensor:
            dtype = reader.weights[0].data.dtype if reader and ops.rounds else torch.float32
            return torch.empty(shape, dtype=dtype, device=tree.tokens.device)

        residual, q, delta = empty(rows, c.hidden_size), empty(rows, c.num_heads, c.head_dim), None
        if inputs is None:
            ops.gather_rows(self.embedding, tree.tokens, residual)
        else:
            residual.copy_(inputs)
        place = (block_table, lengths, tree.row_start)

        def tap(number: int) -> None:
            if at_layers is not None and number in self.hidden_state_layers:
                at_layers[:, self.hidden_state_layers.index(number)] = residual

        for number, (layer, keys, values) in enumerate(zip(self.layers, k_cache, v_cache, strict=True)):
            if layer.attention_norm is None:
                normed = residual if first_inputs is None else first_inputs
            else:
                normed = empty(rows, c.hidden_size, reader=layer.qkv)
                ops.rms_norm(residual, delta, layer.attention_norm, normed, c.rms_norm_eps)
            if not only_cache:
                tap(number)
            qkv = ops.linear(normed, layer.qkv)
            norms = (layer.q_norm, layer.k_norm)
            ops.rope_cache(qkv, cos, sin, *norms, tree.depths, keys, values, *place, q, c.rms_norm_eps, first_node)
            if only_cache and number == len(self.layers) - 1:
                return None
            attended = empty(rows, c.num_heads, c.head_dim, reader=layer.attention_out)
            ops.tree_attention(
                *(q, keys, values, *place, tree.ancestors, attended, c.head_dim**-0.5, layer.window),
                first_node=first_node,
            )
            delta = ops.linear(attended.view(rows, -1), layer.attention_out)
            normed = empty(rows, c.hidden_size, reader=layer.gate_up)
            ops.rms_norm(residual, delta, layer.mlp_norm, normed, c.rms_norm_eps)
            gated = empty(rows, c.intermediate_size, reader=layer.down)
            ops.silu_mul(ops.linear(normed, layer.gate_up), gated)
            delta = ops.linear(gated, layer.down)
        hidden_states = empty(rows, c.hidden_size)
        ops.rms_norm(residual, delta, self.final_norm, hidden_states, c.rms_norm_eps)
        tap(len(self.layers))
        return hidden_states


def _native_layer(layer: Layer) -> _C.DecoderLayer:
    return _C.DecoderLayer(
        attention_norm=layer.attention_norm,
        qkv=native_projection(layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        attention_out=native_projection(layer.attention_out),
        mlp_norm=layer.mlp_norm,
        gate_up=native_projection(layer.gate_up),
        down=native_projection(layer.down),
        window=layer.window,
    )


def native_projection(layer: Projection) -> _C.Projection:
    """As the core takes it, which borrows the weights."""
    return _C.Projection(tuple(w.data for w in layer.weights), tuple(w.rows for w in layer.weights), layer.bias)
