"""GLIDE's layers: self-attention, then attention to the target's cached keys and values, then the MLP."""

from __future__ import annotations

import torch

from specengine import _C
from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import KVCache
from specengine.cache.page_pool import PagePool, page_bytes
from specengine.draft_trees.shapes import Beam
from specengine.drafters.glide.rows import GlideRows, PassRows
from specengine.drafters.growth import Opened, Steps
from specengine.drafters.native import Cache, NativeDraft, growth_shape
from specengine.models.checkpoint_base import ENDS, expected_tensors
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.rope import RopeTables
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.decoder import Decoder, native_projection
from specengine.ops.growth.add_delta import add_delta
from specengine.ops.growth.growing_trees import Logits
from specengine.ops.row_tools import take_rows
from specengine.ops.weight import Projection

BLOCK = 5  # the published block_size


class GlideNetwork:
    """Runs the network of a checkpoint beside its target.

    cross: read the target's cache, where the network was trained to.  projections: its linear layers.
    Embedding and head are the checkpoint's own or, where it has none, the target's.
    Raises ValueError naming a part that does not fit the target.
    """

    def __init__(self, checkpoint: DraftCheckpoint, target: Transformer, dtype: str, *, cross: bool = True) -> None:
        self.config = c = checkpoint.layer_config()
        cross = cross and checkpoint.fields.get("cross_attention", bool, True)
        _check(checkpoint, c, target.config, cross)
        loader = WeightLoader(checkpoint, target.draft_dtype(dtype), target.device, target.ops)
        names = [f"model.layers.{i}" for i in range(c.num_layers)]
        # Positions may exceed the trained length; distances may not.
        self._reach = checkpoint.attention_reach
        self._layers = [loader.layer_at(name, self._reach) for name in names]
        read = ("q_proj", "o_proj") if cross else ()
        self._cross = [[loader.linear(f"{name}.cross_attn.{part}") for part in read] for name in names]
        self._norm = loader.vector("model.norm.weight")
        own = "model.embed_tokens.weight" in checkpoint.tensors
        self._embedding = loader.linear("model.embed_tokens").weights[0] if own else target.embedding
        tokens = checkpoint.vocabulary(target.config)
        self._vocabulary = None if tokens is None else tokens.int().to(target.device)
        own_head = "lm_head.weight" in checkpoint.tensors
        self.head = loader.linear("lm_head") if own_head else target.head_rows(self._vocabulary)
        products = [product for layer in self._layers for product in layer.projections]
        self.projections = [*products, *(product for pair in self._cross for product in pair), self.head]
        self.block = checkpoint.fields.get("block_size", int, BLOCK)
        self._target, self._ops, self.device = target.config, target.ops.layer, target.device
        self._on_device = target.ops.on_device
        self._rope, self._target_rope = RopeTables(c, target.device), RopeTables(target.config, target.device)
        self._kv_shape, self._cache_dtype = (c.num_layers, c.num_kv_heads, c.head_dim), target.cache_dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of its keys and values beside a page of the target's."""
        return page_bytes(self._kv_shape, self._cache_dtype)

    def attach(self, cache: KVCache) -> None:
        """Allocates its pages beside the target's."""
        self.cache = cache
        self._pool = cache.companion(*self._kv_shape, self._cache_dtype)

    @property
    def pool(self) -> PagePool:
        """Its own keys and values."""
        return self._pool

    def native_draft(self, shape: Beam) -> NativeDraft | None:
        """Makes the one native call of a draft; None on CUDA."""
        if self._on_device:
            return None
        cross = [(query, out) for query, out in filter(None, self._cross)]
        weights = _C.GlideWeights(
            decoder=Decoder(self.config, None, self._layers, self._norm).native,
            embedding=self._embedding.data,
            embedding_rows=self._embedding.rows,
            queries=tuple(native_projection(query) for query, _ in cross),
            outs=tuple(native_projection(out) for _, out in cross),
            target_heads=self._target.num_heads,
            target_head_dim=self._target.head_dim,
            reach=self._reach,
            block=self.block,
            head=native_projection(self.head),
            vocabulary=self._vocabulary,
        )
        return NativeDraft(weights, growth_shape(shape))

    @property
    def native_caches(self) -> list[Cache]:
        """Its own cache and the target's, as that call takes them."""
        own, theirs = self._pool, self.cache
        return [(own.k, own.v, *self._rope.cos_sin), (theirs.k, theirs.v, *self._target_rope.cos_sin)]

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)
        self._target_rope.ensure(count)

    @property
    def vocabulary(self) -> torch.Tensor | None:
        """The target's token of each of the drafter's, int32; None: they are the same."""
        return self._vocabulary

    def draft(self, opened: Opened, levels: int) -> Steps:
        """Reads the text; then goes on from one node of every level."""
        text = opened.rows
        assert isinstance(text, GlideRows)  # of its reader
        states = take_rows(self.states(PassRows(text, opened.place, text.seen)), opened.last)
        while True:
            rows = yield Logits(self._ops.linear(states, self.head))
            states = self.states(PassRows(rows, opened.root_place, text.seen_later, rows.first_node))

    def states(self, read: PassRows) -> torch.Tensor:
        """Caches the rows' own keys and values; returns their states [M, hidden] as the head reads them."""
        c, ops, rows, count = self.config, self._ops, read.rows, len(read.rows.tokens)

        def empty(*shape: int, reader: Projection | None = None) -> torch.Tensor:
            dtype = ops.dtype_for(reader) if reader else torch.float32
            return torch.empty(count, *shape, dtype=dtype, device=self.device)

        def norm(weight: torch.Tensor | None, reader: Projection | None) -> torch.Tensor:
            out = empty(c.hidden_size, reader=reader)
            ops.rms_norm(x, delta, weight, out, c.rms_norm_eps)
            return out

        x, q, tokens, delta = empty(c.hidden_size), empty(c.num_heads, c.head_dim), rows.tokens, None
        if self._embedding.rows < self._target.vocab_size:  # any row will do for a token that it was not trained with
            tokens = torch.where(tokens < self._embedding.rows, tokens, 0)
        ops.gather_rows(self._embedding, tokens, x)
        for i, (layer, cross) in enumerate(zip(self._layers, self._cross, strict=True)):
            cache, norms = read.view(self._pool.k[i], self._pool.v[i]), (layer.q_norm, layer.k_norm)
            qkv = ops.linear(norm(layer.attention_norm, layer.qkv), layer.qkv)
            ops.rope_cache(qkv, *self._rope.cos_sin, *norms, rows.depths, cache, q, c.rms_norm_eps)
            attended = empty(c.num_heads, c.head_dim, reader=layer.attention_out)
            ops.tree_attention(q, cache, rows.ancestors, attended, c.head_dim**-0.5, layer.window)
            delta = ops.linear(attended.view(count, -1), layer.attention_out)
            if cross:
                delta = self._read_target(self._added(x, delta, cross[0]), i, cross, read)
            gated = empty(c.intermediate_size, reader=layer.down)
            ops.silu_mul(ops.linear(norm(layer.mlp_norm, layer.gate_up), layer.gate_up), gated)
            delta = ops.linear(gated, layer.down)
        return norm(self._norm, self.head)

    def _added(self, x: torch.Tensor, delta: torch.Tensor, reader: Projection) -> torch.Tensor:
        """Adds delta to x; returns x as a product reads it, with no norm before it."""
        if self._on_device:
            return add_delta(x, delta, self._ops.dtype_for(reader), total=x)
        x += delta
        return x

    def _read_target(self, x: torch.Tensor, layer: int, cross: list[Projection], read: PassRows) -> torch.Tensor:
        """Returns what attention to the target's cache adds to x [M, hidden]; queries have the heads of the target."""
        t, seen = self._target, read.seen
        which = t.attention_layers - self.config.num_layers + layer
        query, out = cross
        nothing = torch.empty(len(self._pool.k[layer]), 0, PAGE_SIZE, t.head_dim, device=self.device)
        raw, unkept = self._ops.linear(x, query), read.view(nothing, nothing)  # queries are rotated alone
        q = torch.empty(len(x), t.num_heads, t.head_dim, device=self.device)
        attended = torch.empty_like(q, dtype=self._ops.dtype_for(out))
        self._ops.rope_cache(raw, *self._target_rope.cos_sin, None, None, read.rows.depths, unkept, q, 0)
        cache = seen.view(self.cache.k[which], self.cache.v[which])
        self._ops.tree_attention(q, cache, seen.ancestors, attended, t.head_dim**-0.5, self._reach)
        return self._ops.linear(attended.view(len(x), -1), out)


def _check(checkpoint: DraftCheckpoint, config: ModelConfig, target: ModelConfig, cross: bool) -> None:
    fields = checkpoint.fields
    asked = {
        "large_hidden_size": target.hidden_size,
        "large_num_hidden_layers": target.num_layers,
        "large_num_attention_heads": target.num_heads,
        "large_num_key_value_heads": target.num_kv_heads,
        "large_head_dim": target.head_dim,
    }
    for name, value in asked.items():
        if fields.get(name, int, value) != value:
            raise fields.error(name, f"is {checkpoint.json[name]}, the target has {value}")
    if config.num_layers > target.attention_layers:
        raise fields.error("num_hidden_layers", f"is {config.num_layers}, the target has {target.num_layers}")
    if fields.get("block_size", int, BLOCK) < 1:
        raise fields.error("block_size", "must be positive")
    checkpoint.expect_all({name: shape for name, shape in expected_tensors(config).items() if name not in ENDS})
    heads = target.num_heads * target.head_dim
    for i in range(config.num_layers if cross else 0):
        checkpoint.expect(f"model.layers.{i}.cross_attn.q_proj.weight", heads, config.hidden_size)
        checkpoint.expect(f"model.layers.{i}.cross_attn.o_proj.weight", config.hidden_size, heads)
    _check_ends(checkpoint, config, target)


def _check_ends(checkpoint: DraftCheckpoint, config: ModelConfig, target: ModelConfig) -> None:
    """Checks embedding and head: own ones of the drafter's size, or the target's."""
    tokens = checkpoint.vocabulary(target)
    own = [name for name in ENDS if name in checkpoint.tensors]
    for name in own:
        rows = checkpoint.rows(name)
        checkpoint.expect(name, rows, config.hidden_size)
        if rows > target.vocab_size:
            raise checkpoint.error(f"'{name}' has {rows} tokens, the target has {target.vocab_size}")
        if name == ENDS[1] and tokens is not None and rows != len(tokens):
            raise checkpoint.error(f"'{name}' tells {rows} tokens apart, d2t {len(tokens)}")
    if config.hidden_size != target.hidden_size and len(own) < 2:
        raise checkpoint.error(
            f"without {' and '.join(name for name in ENDS if name not in own)} it shares the target's, "
            f"of hidden size {target.hidden_size} instead of its {config.hidden_size}"
        )
