"""The one transformer: LLaMA, Vicuna, Mistral, Qwen2, Qwen3 and every model of their shape.

A pass takes the rows of a TreeBatch (prefill chunk, root, or tree: all the same), writes their keys and values to the
cache behind the prefix and returns hidden states, and logits or greedy tokens, of every row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import Checkpoint
from specengine.models.checkpoint_base import ENDS, expected_tensors
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.models.weights import WeightLoader
from specengine.ops import Ops, ops_for
from specengine.ops.weight import Projection, Weight
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class TargetOutput:
    """scores: logits float32 [M, V] or greedy tokens int32 [M].  hidden_states: of the same rows."""

    scores: torch.Tensor
    hidden_states: HiddenStates


class Transformer:
    """Weights of one model, ready to run. dtype: a name of models.weights.DTYPES."""

    tensor_parallel = 1  # processes that its layers are divided among

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: torch.device, ops: Ops | None = None) -> None:
        self.config: ModelConfig = checkpoint.config
        self.device, self.ops = device, ops or ops_for(device)
        loader = self._new_loader(checkpoint, dtype)
        self._embedding = loader.linear("model.embed_tokens")
        self._layers = [loader.layer(i) for i in range(self.config.num_layers)]
        self.final_norm = loader.vector("model.norm.weight")
        self.head = self._embedding if self.config.tie_embeddings else loader.linear("lm_head")
        self.hidden_state_layers: tuple[int, ...] = ()
        self._decoder = self._new_decoder()
        self.formats = loader.formats
        self._rope = RopeTables(self.config, device)

    def _new_loader(self, checkpoint: Checkpoint, dtype: str) -> WeightLoader:
        return WeightLoader(checkpoint, dtype, self.device, self.ops)

    def _new_decoder(self, hidden_state_layers: tuple[int, ...] = ()) -> Callable[..., torch.Tensor]:
        return self.ops.decoder(self.config, self.embedding, self._layers, self.final_norm, hidden_state_layers)

    def with_hidden_state_layers(self, layers: Sequence[int]) -> Transformer:
        """The same model, whose passes also give out the residual stream before these layers (their number: behind the
        last); it shares all memory. Raises ValueError for layers that do not rise or do not exist."""
        if tuple(layers) == self.hidden_state_layers:
            return self
        at_layers = copy.copy(self)
        at_layers.hidden_state_layers = tuple(layers)
        at_layers._decoder = at_layers._new_decoder(at_layers.hidden_state_layers)
        return at_layers

    def first_layers(self, count: int) -> Transformer:
        """The model that goes from layer `count` straight to the final norm and the head; it shares all memory.

        Raises ValueError where there are not so many layers.
        """
        check_range("layers", count, 1, self.config.num_layers)
        sliding = self.config.sliding_layers[:count]
        part = copy.copy(self)
        part.config = replace(
            self.config,
            num_layers=count,
            sliding_layers=sliding if any(sliding) else (),
            sliding_window=self.config.sliding_window if any(sliding) else None,
        )
        part._layers = self._layers[:count]
        part.hidden_state_layers = ()
        part._decoder = part._new_decoder()
        return part

    def with_layers(self, checkpoint: DraftCheckpoint, dtype: str) -> Transformer:
        """The model of a checkpoint's layers and final norm between this one's embedding and head.

        Raises ValueError for a checkpoint of another width or vocabulary, and for tensors missing or of other shapes.
        """
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self.config, name), getattr(checkpoint.config, name)
            if ours != theirs:
                raise ValueError(f"{checkpoint.source}: {name} is {theirs}, the target's is {ours}")
        shapes = expected_tensors(checkpoint.config)
        checkpoint.expect_all({name: shape for name, shape in shapes.items() if name not in ENDS})
        loader = WeightLoader(checkpoint, dtype, self.device, self.ops)
        other = copy.copy(self)
        other.config, other.hidden_state_layers = checkpoint.config, ()
        other._layers = [loader.layer(i) for i in range(other.config.num_layers)]
        other.final_norm = loader.vector("model.norm.weight")
        other.formats = loader.formats
        other._rope = RopeTables(other.config, self.device)
        other._decoder = other._new_decoder()
        return other

    @property
    def failure(self) -> str | None:
        """Why no pass can be run any more: what became of a process that has a part of it. None: passes can be run."""
        return None

    @property
    def embedding(self) -> Weight:
        """Rows [V, hidden]."""
        return self._embedding.weights[0]

    def head_rows(self, tokens: torch.Tensor | None) -> Projection:
        """The head for some tokens, int32 [Vd], in the head's own format; None: all of it."""
        if tokens is None:
            return self.head
        (whole,), bias = self.head.weights, self.head.bias
        rows = torch.empty(len(tokens), self.config.hidden_size, device=self.device)
        self.ops.layer.gather_rows(whole, tokens, rows)
        part = self.ops.empty_weight(*rows.shape, whole.format, self.device)
        self.ops.pack_linear(rows, part, 0)
        return Projection((part,), None if bias is None else bias[tokens.long()])

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
        self._rope.ensure(count)

    @property
    def projections(self) -> list[Projection]:
        """Every linear layer of a pass."""
        return [self.head, *(product for layer in self._layers for product in layer.projections)]

    def weight_bytes(self) -> int:
        """Bytes of weights one pass reads."""
        return sum(layer.nbytes for layer in self.projections)

    def tune(self, others: Sequence[Projection] = ()) -> None:
        """Measures how to multiply by its weights and others where that is a choice; not while a graph is captured."""
        if self.ops.tune is not None:
            for layer in [*self.projections, *others]:
                self.ops.tune(layer)

    def forward(self, tree: TreeBatch, cache: KVCache, batch: CacheBatch, greedy: bool = False) -> TargetOutput:
        """HiddenStates and logits of every row, or with `greedy` the most likely token alone (-1 where there is none)."""
        hidden_states = self.hidden_states(tree, cache, batch)
        last = hidden_states.last
        return TargetOutput(self.ops.linear_argmax(last, self.head) if greedy else self.logits(last), hidden_states)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits float32 [M, V] of features [M, hidden]."""
        return self.ops.linear(hidden_states, self.head)

    def hidden(self, tree: TreeBatch, cache: KVCache, batch: CacheBatch) -> torch.Tensor:
        """The last hidden states alone, float32 [M, hidden]."""
        return self.hidden_states(tree, cache, batch).last

    def hidden_states(self, tree: TreeBatch, cache: KVCache, batch: CacheBatch) -> HiddenStates:
        """HiddenStates of every row, without logits; keys and values of row r go to slot length + node index."""
        shape, at_layers = (len(tree.tokens), len(self.hidden_state_layers), self.config.hidden_size), None
        if self.hidden_state_layers:
            at_layers = torch.empty(shape, device=self.device)
        place = (cache.k, cache.v, batch.block_table, batch.lengths)
        return HiddenStates(self._decoder(tree, *place, *self._rope.cos_sin, at_layers), at_layers)
