"""The one transformer: LLaMA, Vicuna, Mistral, Qwen2, Qwen3 and every model of their shape.

A pass takes the rows of a TreeBatch (prefill chunk, root, or tree: all the same), writes their keys and values to the
cache behind the prefix and returns features, and logits or greedy tokens, of every row.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from specengine.kv_cache import CacheBatch, KVCache
from specengine.models.checkpoint import Checkpoint
from specengine.models.config import ModelConfig
from specengine.models.rope import rope_tables
from specengine.models.weights import WeightLoader
from specengine.ops import Ops, ops_for
from specengine.ops.weight import Linear
from specengine.tree import TreeBatch


@dataclass(frozen=True)
class TargetOutput:
    """scores: logits float32 [M, V] or greedy tokens int32 [M].  features: float32 [M, hidden], normed."""

    scores: torch.Tensor
    features: torch.Tensor


class Transformer:
    """Weights of one model, ready to run. dtype: a name of models.weights.DTYPES."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: torch.device, ops: Ops | None = None) -> None:
        self.config: ModelConfig = checkpoint.config
        self.device, self.ops = device, ops or ops_for(device)
        loader = WeightLoader(checkpoint, dtype, device, self.ops)
        embedding = loader.linear("model.embed_tokens")
        self._layers = [loader.layer(i) for i in range(self.config.num_layers)]
        self.final_norm = loader.vector("model.norm.weight")
        self.head = embedding if self.config.tie_embeddings else loader.linear("lm_head")
        self._decoder = self.ops.decoder(self.config, embedding.weights[0], self._layers, self.final_norm)
        self.formats = loader.formats
        self._rope = (torch.empty(0), torch.empty(0))  # cos and sin; replaced only by a longer pair
        self._rope_lock = threading.Lock()
        self.ensure_positions(min(2048, self.config.max_position))

    @property
    def cache_dtype(self) -> torch.dtype:
        """float32 where a weight is, else half of that: what the weights lost by rounding is more."""
        if "float32" in self.formats:
            return torch.float32
        return torch.bfloat16 if "bfloat16" in self.formats else torch.float16

    def new_cache(self, pages: int | None = None) -> KVCache:
        """An empty cache for this model; pages: of a pool that does not grow."""
        c = self.config
        return KVCache(c.num_layers, c.num_kv_heads, c.head_dim, self.cache_dtype, self.device, pages)

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        with self._rope_lock:  # engines that share this model may grow it from several threads
            have = len(self._rope[0])
            if count > have:
                cos, sin = rope_tables(self.config, max(count, min(2 * have, self.config.max_position)))
                self._rope = (cos.to(self.device), sin.to(self.device))

    @property
    def linears(self) -> list[Linear]:
        """Every linear layer of a pass."""
        return [self.head, *(x for y in self._layers for x in (y.qkv, y.attention_out, y.gate_up, y.down))]

    def weight_bytes(self) -> int:
        """Bytes of weights one pass reads."""
        return sum(linear.nbytes for linear in self.linears)

    def tune(self) -> None:
        """Measures how to multiply by its weights where that is a choice; not while a graph is captured."""
        for linear in self.linears if self.ops.tune else ():
            self.ops.tune(linear)

    @torch.inference_mode()
    def forward(self, tree: TreeBatch, cache: KVCache, batch: CacheBatch, greedy: bool = False) -> TargetOutput:
        """Features and logits of every row, or with `greedy` the most likely token alone (-1 where there is none)."""
        features = self.hidden(tree, cache, batch)
        scores = self.ops.linear_argmax(features, self.head) if greedy else self.ops.linear(features, self.head)
        return TargetOutput(scores, features)

    @torch.inference_mode()
    def hidden(self, tree: TreeBatch, cache: KVCache, batch: CacheBatch) -> torch.Tensor:
        """Features float32 [M, hidden] without logits; keys and values of row r go to slot length + node index."""
        return self._decoder(tree, cache.k, cache.v, batch.block_table, batch.lengths, *self._rope)
