"""One pass of all decoder layers op by op, on any device: a captured graph gains nothing from one call per pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from specengine._C import DeltaStates, KVCacheView, RotatedRows
from specengine.ops.decoder import DecoderSizes, Layer, Rows
from specengine.ops.experts.moe import ExpertOps
from specengine.ops.gated_delta.matrices import NO_STATES, GatedDelta
from specengine.ops.layer import Kept
from specengine.ops.layerwise.fused import FusedOps
from specengine.ops.lora.matrices import LoraLayer, LoraProjection
from specengine.ops.prefill.chains import PromptChains
from specengine.ops.weight import Projection, Weight
from specengine.utils.multipliers import PLAIN, Multipliers


@dataclass(frozen=True)
class LayerOps:
    """The ops of a layer; each field has the signature of the function of its name in specengine.ops.

    rounds: rows between two ops have the dtype of the weight that reads them, else float32.
    fused: products that do the work of the op behind them; None: all ops are calls of their own.
    """

    gather_rows: Callable[..., None]
    rms_norm: Callable[..., None]
    linear: Callable[..., torch.Tensor]
    rope_cache: Callable[..., None]
    tree_attention: Callable[..., None]
    silu_mul: Callable[..., None]
    add_lora: Callable[..., None]
    gate_heads: Callable[..., None]
    gated_delta: Callable[..., None]
    experts: ExpertOps
    rounds: bool
    fused: FusedOps | None = None

    def dtype_for(self, reader: Projection) -> torch.dtype:
        """Returns the dtype of rows that a product reads."""
        return reader.weights[0].row_dtype if self.rounds else torch.float32

    def gather_norm(self, weight: Weight | None, ids, residual, norm, out, eps: float, kept: Kept | None) -> None:
        """residual[M, C] = rows `ids` of an embedding; out[M, C] = their norm."""
        rows = residual, norm, out, eps, kept
        if self.fused is None or weight is None or not self.fused.gather_norm(weight, ids, *rows):
            self.gather_rows(weight, ids, residual)
            self.rms_norm(residual, None, norm, out, eps, kept)

    def linear_silu(self, x: torch.Tensor, layer: Projection, out: torch.Tensor) -> None:
        """out[M, I] = silu(gate) * up of linear(x, layer) = [gate | up]."""
        if self.fused is None or not self.fused.silu(x, layer, out):
            self.silu_mul(self.linear(x, layer), out)

    def linear_norm(self, x, layer: Projection, residual, norm, out, eps: float, kept: Kept | None) -> None:
        """residual[M, N] += linear(x, layer); out[M, N] = its norm."""
        if self.fused is None or not self.fused.norm(x, layer, residual, norm, out, eps, kept):
            self.rms_norm(residual, self.linear(x, layer), norm, out, eps, kept)

    def linear_rope(self, x, layer: Projection, rows: RotatedRows, cache: KVCacheView, q, eps: float) -> torch.Tensor:
        """Returns linear(x, layer), after rope_cache has read it."""
        if self.fused is not None:
            qkv = torch.empty(len(x), layer.rows, device=x.device)
            if self.fused.rope(x, layer, rows, cache, q, eps, qkv):
                return qkv
        qkv = self.linear(x, layer)
        self.rope_cache(qkv, rows.cos, rows.sin, rows.q_norm, rows.k_norm, rows.depths, cache, q, eps)
        return qkv


class LayerwiseDecoder:
    """The layers of a model as Decoder takes them, over the ops of any device.  out_dtype: of the rows of a pass."""

    def __init__(
        self,
        ops: LayerOps,
        config: DecoderSizes,
        embedding: Weight | None,
        layers: Sequence[Layer],
        final_norm: torch.Tensor,
        hidden_state_layers: Sequence[int] = (),
        first_columns: int = 0,
        lora: Sequence[LoraLayer] = (),
        multipliers: Multipliers = PLAIN,
        out_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.ops = ops
        self.config = config
        self.hidden_state_layers = tuple(hidden_state_layers)
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.lora = tuple(lora)
        self.multipliers = multipliers
        self.out_dtype = out_dtype

    def _gated(self, layer: Layer) -> bool:
        c = self.config
        return layer.gated_delta is None and layer.qkv.rows == 2 * (c.num_heads + c.num_kv_heads) * c.head_dim

    def _norm_of(self, number: int) -> tuple[torch.Tensor, torch.dtype]:
        """Returns the norm before a layer or behind the last one, and the dtype of its rows."""
        if number == len(self.layers):
            return self.final_norm, self.out_dtype
        layer = self.layers[number]
        if layer.attention_norm is None:
            raise ValueError(f"layers: expected a norm before layer {number}; only the first layer may have none")
        return layer.attention_norm, self.ops.dtype_for(layer.qkv)

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
        states: DeltaStates = NO_STATES,
        chains: PromptChains | None = None,
    ) -> torch.Tensor | None:
        """As Decoder; the caller answers for slots and positions. experts: stays as it is.

        chains: see tree_attention_cuda.
        inputs: [M, hidden], which are copied; or [M, 1, hidden], which become the stream and are overwritten.
        The latter may be at_layers itself, where only the last layer's output is wanted.
        """
        c, ops, rows = self.config, self.ops, len(tree.tokens)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=tree.tokens.device)

        bare = LoraLayer.empty()
        factors, in_place = self.multipliers, inputs is not None and inputs is at_layers
        q = empty(rows, c.num_heads, c.head_dim)
        is_stream = inputs is not None and inputs.dim() == 3
        residual = inputs[:, 0] if is_stream and inputs is not None else empty(rows, c.hidden_size)
        stream_eps = c.rms_norm_eps / factors.residual**2
        scaled, first = factors.embedding != factors.residual, self.layers[0]
        normed = residual if first_inputs is None else first_inputs
        if first.attention_norm is not None:
            normed = empty(rows, c.hidden_size, dtype=ops.dtype_for(first.qkv))

        def kept_at(number: int) -> Kept | None:
            """Where the stream before a layer is kept."""
            if at_layers is None or in_place or only_cache or number not in self.hidden_state_layers:
                return None
            return at_layers, self.hidden_state_layers.index(number)

        def norm_stream(delta: torch.Tensor | None, norm: torch.Tensor, out: torch.Tensor, kept: Kept | None) -> None:
            """Adds to the stream and norms it; keeps it as the model has it, times its factor."""
            ops.rms_norm(residual, delta, norm, out, stream_eps, kept if factors.residual == 1 else None)
            keep_scaled(kept)

        def keep_scaled(kept: Kept | None) -> None:
            if kept is not None and factors.residual != 1:
                layers, place = kept
                layers[:, place] = residual * factors.residual

        if inputs is None and first.attention_norm is not None and not scaled and factors.residual == 1:
            entry = residual, first.attention_norm, normed, stream_eps
            ops.gather_norm(self.embedding, tree.tokens, *entry, kept_at(0))
        else:
            if inputs is None:
                ops.gather_rows(self.embedding, tree.tokens, residual)
            elif not is_stream:
                residual.copy_(inputs)
            if scaled:
                residual.mul_(factors.embedding / factors.residual)
            if first.attention_norm is not None:
                norm_stream(None, first.attention_norm, normed, kept_at(0))
            elif (kept := kept_at(0)) is not None:
                torch.mul(residual, factors.residual, out=kept[0][:, kept[1]])

        def product(x: torch.Tensor, layer: Projection, added: LoraProjection) -> torch.Tensor:
            out = ops.linear(x, layer)
            if added.modules:
                ops.add_lora(x, added, tree.row_start, adapters, out)
            return out

        def attention(
            layer: Layer, normed: torch.Tensor, added: LoraProjection, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor | None:
            cache = KVCacheView(keys, values, block_table, lengths, tree.row_start, first_node)
            turned = RotatedRows(cos, sin, layer.q_norm, layer.k_norm, tree.depths)
            if added.modules:
                qkv = product(normed, layer.qkv, added)
                ops.rope_cache(qkv, cos, sin, layer.q_norm, layer.k_norm, tree.depths, cache, q, c.rms_norm_eps)
            else:
                qkv = ops.linear_rope(normed, layer.qkv, turned, cache, q, c.rms_norm_eps)
            if only_cache and layer is self.layers[-1]:
                return None
            attended = empty(rows, c.num_heads, c.head_dim, dtype=ops.dtype_for(layer.attention_out))
            scale = factors.attention_scale(c.head_dim)
            read = (q, cache, tree.ancestors, attended, scale, layer.window)
            known = {} if chains is None else {"chains": chains}
            ops.tree_attention(*read, sinks=layer.sinks, upcoming=layer.attention_out.weights[0].data, **known)
            if self._gated(layer):
                ops.gate_heads(qkv, attended)
            return attended.view(rows, -1)

        def recurrence(layer: GatedDelta, reader: Projection, qkv: torch.Tensor, number: int) -> torch.Tensor:
            out = empty(rows, layer.value_heads * len(layer.norm), dtype=ops.dtype_for(reader))
            ops.gated_delta(qkv, layer, states, number, tree.row_start, tree.ancestors, out, c.rms_norm_eps)
            return out

        def add_and_norm(
            x: torch.Tensor,
            layer: Projection,
            added: LoraProjection,
            norm: torch.Tensor,
            dtype: torch.dtype,
            kept: Kept | None = None,
        ) -> torch.Tensor:
            out = empty(rows, c.hidden_size, dtype=dtype)
            if added.modules:
                norm_stream(product(x, layer, added), norm, out, kept)
            else:
                ops.linear_norm(x, layer, residual, norm, out, stream_eps, kept if factors.residual == 1 else None)
                keep_scaled(kept)
            return out

        places = zip(k_cache, v_cache, strict=True)  # of layers with attention
        recurrent = count()
        for number, layer in enumerate(self.layers):
            lora = bare if adapters is None else self.lora[number]
            if layer.gated_delta is None:
                attended = attention(layer, normed, lora.qkv, *next(places))
            else:
                qkv = product(normed, layer.qkv, lora.qkv)
                attended = recurrence(layer.gated_delta, layer.attention_out, qkv, next(recurrent))
            if attended is None:
                return None
            read = torch.float32 if layer.moe is not None or layer.gate_up is None else ops.dtype_for(layer.gate_up)
            normed = add_and_norm(attended, layer.attention_out, lora.attention_out, layer.mlp_norm, read)
            next_norm, next_dtype = self._norm_of(number + 1)
            delta = None
            if layer.gate_up is not None and layer.down is not None:
                gated = empty(rows, layer.gate_up.rows // 2, dtype=ops.dtype_for(layer.down))
                if lora.gate_up.modules:
                    ops.silu_mul(product(normed, layer.gate_up, lora.gate_up), gated)
                else:
                    ops.linear_silu(normed, layer.gate_up, gated)
                if layer.moe is None:
                    normed = add_and_norm(gated, layer.down, lora.down, next_norm, next_dtype, kept_at(number + 1))
                    continue
                delta = product(gated, layer.down, lora.down)
            if layer.moe is not None:
                delta = ops.experts(normed, layer.moe, delta)
            normed = empty(rows, c.hidden_size, dtype=next_dtype)
            norm_stream(delta, next_norm, normed, kept_at(number + 1))
        return normed
