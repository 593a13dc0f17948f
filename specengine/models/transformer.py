"""The one transformer: LLaMA, Vicuna, Mistral, Qwen2, Qwen3 and every model of their shape.

A pass takes the rows of a TreeBatch (prefill chunk, root, or tree: all the same), writes their keys and values to the
cache behind the prefix and returns logits and features of every row. All arithmetic is float32; weights and cache are
float32 or bfloat16.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specengine.kv_cache import CacheBatch, KVCache
from specengine.models.checkpoint import Checkpoint
from specengine.models.config import ModelConfig
from specengine.models.rope import rope_tables
from specengine.ops import Ops, ops_for
from specengine.tree import TreeBatch

_BLOCK_BYTES = 8 << 20  # weights are read and packed in blocks of about this size


@dataclass(frozen=True)
class Linear:
    """A prepared weight and its bias: [N, C] in the form Ops.linear wants, float32 [N]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    rows: int


@dataclass(frozen=True)
class Layer:
    """One decoder layer; q, k, v and gate, up are fused to one weight each."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int


@dataclass(frozen=True)
class TargetOutput:
    """logits: float32 [M, V].  features: float32 [M, hidden], the states after the final norm."""

    logits: torch.Tensor
    features: torch.Tensor


class Transformer:
    """Weights of one model, ready to run."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ops: Ops | None = None
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.dtype, self.device = dtype, device
        self.ops = ops or ops_for(device)
        loader = _Loader(checkpoint, dtype, device, self.ops)
        self.embedding = loader.linear("model.embed_tokens")
        self.layers = [loader.layer(i) for i in range(self.config.num_layers)]
        self.final_norm = loader.vector("model.norm.weight")
        self.head = self.embedding if self.config.tie_embeddings else loader.linear("lm_head")
        self._rope = (torch.empty(0), torch.empty(0))  # cos and sin; replaced only by a longer pair
        self._rope_lock = threading.Lock()
        self.ensure_positions(min(2048, self.config.max_position))

    def new_cache(self) -> KVCache:
        """An empty cache for this model."""
        c = self.config
        return KVCache(c.num_layers, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        with self._rope_lock:  # engines that share this model may grow it from several threads
            have = len(self._rope[0])
            if count > have:
                cos, sin = rope_tables(self.config, max(count, min(2 * have, self.config.max_position)))
                self._rope = (cos.to(self.device), sin.to(self.device))

    def weight_bytes(self) -> int:
        """Bytes of weights one pass reads."""
        linears = [self.head, *(x for y in self.layers for x in (y.qkv, y.attention_out, y.gate_up, y.down))]
        return sum(linear.weight.nbytes for linear in linears)

    @torch.inference_mode()
    def forward(self, tree: TreeBatch, cache: KVCache, batch: CacheBatch) -> TargetOutput:
        """Logits and features of every row; keys and values of row r go to slot length + node index."""
        features = self.hidden(tree, cache, batch)
        return TargetOutput(self._linear(features, self.head), features)

    @torch.inference_mode()
    def hidden(self, tree: TreeBatch, cache: KVCache, batch: CacheBatch) -> torch.Tensor:
        """Features float32 [M, hidden] without logits: prefill."""
        c, ops = self.config, self.ops
        rows = len(tree.tokens)
        residual = self._empty(rows, c.hidden_size)
        ops.gather_rows(self.embedding.weight, tree.tokens, residual)
        normed, delta = torch.empty_like(residual), None
        q = self._empty(rows, c.num_heads, c.head_dim)
        attended = torch.empty_like(q)
        gated = self._empty(rows, c.intermediate_size)
        cos, sin = self._rope
        place = (batch.block_table, batch.lengths, tree.row_start)
        for i, layer in enumerate(self.layers):
            k_cache, v_cache = cache.k[i], cache.v[i]
            ops.rms_norm(residual, delta, layer.attention_norm, normed, c.rms_norm_eps)
            qkv = self._linear(normed, layer.qkv)
            ops.rope_cache(
                *(qkv, cos, sin, layer.q_norm, layer.k_norm, tree.depths),
                *(k_cache, v_cache, *place, q, c.rms_norm_eps),
            )
            ops.tree_attention(*(q, k_cache, v_cache, *place, tree.ancestors, attended, c.head_dim**-0.5, layer.window))
            delta = self._linear(attended.view(rows, -1), layer.attention_out)
            ops.rms_norm(residual, delta, layer.mlp_norm, normed, c.rms_norm_eps)
            ops.silu_mul(self._linear(normed, layer.gate_up), gated)
            delta = self._linear(gated, layer.down)
        ops.rms_norm(residual, delta, self.final_norm, normed, c.rms_norm_eps)
        return normed

    def _linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        out = self._empty(x.shape[0], linear.rows)
        self.ops.linear(x, linear.weight, linear.bias, out)
        return out

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.device)


class _Loader:
    """Turns a checkpoint's tensors into prepared weights, block by block, so that little is held twice."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ops: Ops) -> None:
        self.checkpoint, self.dtype, self.device, self.ops = checkpoint, dtype, device, ops

    def layer(self, index: int) -> Layer:
        prefix, config = f"model.layers.{index}", self.checkpoint.config
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            attention_norm=self.vector(f"{prefix}.input_layernorm.weight"),
            qkv=self.linear(*(f"{attention}.{x}_proj" for x in "qkv")),
            q_norm=self.vector(f"{attention}.q_norm.weight") if config.qk_norm else None,
            k_norm=self.vector(f"{attention}.k_norm.weight") if config.qk_norm else None,
            attention_out=self.linear(f"{attention}.o_proj"),
            mlp_norm=self.vector(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self.linear(f"{mlp}.down_proj"),
            window=config.layer_window(index) or 0,
        )

    def vector(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name).float().to(self.device)

    def linear(self, *names: str) -> Linear:
        """One weight of the rows of all `names`, in order."""
        shapes = [self.checkpoint.tensors[f"{name}.weight"].shape for name in names]
        rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
        weight = self.ops.empty_weight(rows, columns, self.dtype, self.device)
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            for start, stop in _blocks(shape[0], columns):
                block = self.checkpoint.read_rows(f"{name}.weight", start, stop)
                self.ops.pack_linear(block.to(self.device), weight, first + start)
            first += shape[0]
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self.checkpoint.tensors]
        return Linear(weight, torch.cat([self.vector(b) for b in biases]) if biases else None, rows)


def _blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK_BYTES // (4 * columns))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
