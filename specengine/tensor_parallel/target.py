"""A model whose layers are divided among processes, as its first rank sees it: with the interface of the whole one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.cache.page_pool import page_bytes
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import Checkpoint
from specengine.models.checkpoint_base import CPU
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops import Ops, native
from specengine.ops.decoder import Pass
from specengine.ops.verify_tree import Accepted
from specengine.tensor_parallel.connection import Compact, Forward, Resize
from specengine.tensor_parallel.group import Group
from specengine.tensor_parallel.layers import part_decoder
from specengine.tensor_parallel.shards import Parts, ShardLoader


class ParallelTransformer(Transformer):
    """Rank 0: its part of the layers, and all of embedding, final norm and head. The other ranks have nothing else than
    their parts, and only run passes.

    path: where the other processes find the checkpoint. Raises ValueError for a model that cannot be divided so,
    RankFailed where a process fails.
    """

    def __init__(self, checkpoint: Checkpoint, path: str, dtype: str, size: int) -> None:
        self.tensor_parallel = size
        self._parts = Parts.of(checkpoint.config, size)
        self._group = Group(size, path, dtype)
        try:
            super().__init__(checkpoint, dtype, CPU, native)
        except BaseException:
            self._group.close()
            raise
        self._group.join()

    @property
    def failure(self) -> str | None:
        return self._group.failure

    def _new_loader(self, checkpoint: Checkpoint, dtype: str) -> WeightLoader:
        return ShardLoader(checkpoint, dtype, CPU, native, self._parts, rank=0)

    def _new_decoder(self, hidden_state_layers: tuple[int, ...] = ()) -> Pass:
        part = self._parts.config(0, self.config)
        return part_decoder(native, self._group.gather, part, self._layers, self.final_norm, hidden_state_layers)

    def first_layers(self, count: int) -> Transformer:
        raise ValueError("drafter: a target under tensor_parallel has no layers of its own to draft with")

    def with_layers(self, checkpoint: DraftCheckpoint, dtype: str) -> Transformer:
        alone = Transformer.__new__(Transformer)  # what is drafted with is whole, in this process
        vars(alone).update(vars(self), tensor_parallel=1)
        return alone.with_layers(checkpoint, dtype)

    def new_cache(self, pages: int | None = None) -> KVCache:
        if pages is not None:
            raise ValueError("pages: under tensor_parallel caches grow with the need, got a fixed number")
        return ParallelCache(self._group, self.config, self._parts.config(0, self.config), self.cache_dtype)

    def hidden_states(self, tree: TreeBatch, cache: KVCache, batch: CacheBatch) -> HiddenStates:
        assert isinstance(cache, ParallelCache)  # new_cache() makes no others
        hidden, at_layers = self.config.hidden_size, None
        inputs = torch.empty(len(tree.tokens), hidden)
        self.ops.layer.gather_rows(self.embedding, tree.tokens, inputs)
        if self.hidden_state_layers:
            at_layers = torch.empty(len(tree.tokens), len(self.hidden_state_layers), hidden)
        cos, sin = self._rope.cos_sin
        ancestors = None if tree.ancestors is None else tree.ancestors.numpy()
        place = (batch.block_table, batch.lengths)
        message = Forward(
            cache=cache.number,
            inputs=inputs.numpy(),
            depths=tree.depths.numpy(),
            row_start=tree.row_start.numpy(),
            ancestors=ancestors,
            block_table=batch.block_table.numpy(),
            lengths=batch.lengths.numpy(),
            positions=len(cos),
        )
        with self._group.together(message):
            last = self._decoder(tree, cache.k, cache.v, *place, cos, sin, at_layers, inputs)
        return HiddenStates(last, at_layers)


class ParallelCache(KVCache):
    """The first rank's part of a cache, which decides for all of them; the other parts follow."""

    def __init__(self, group: Group, whole: ModelConfig, part: ModelConfig, dtype: torch.dtype) -> None:
        self._group, self.number = group, group.new_cache()
        self._whole = (whole.num_layers, whole.num_kv_heads, whole.head_dim)
        super().__init__(part.num_layers, part.num_kv_heads, part.head_dim, dtype, CPU)
        weakref.finalize(self, group.forget, self.number).atexit = False

    @property
    def page_bytes(self) -> int:
        """Of all ranks."""
        return page_bytes(self._whole, self.dtype)

    def compact(self, batch: CacheBatch, accepted: Accepted, ops: Ops) -> None:
        columns = (batch.block_table, batch.lengths, accepted.path, accepted.path_length)
        with self._group.together(Compact(self.number, *(column.numpy() for column in columns))):
            super().compact(batch, accepted, ops)

    def _resize(self, pages: int, kept: Mapping[int, int]) -> None:
        super()._resize(pages, kept)  # first: it may find no room, and then nobody has moved
        with self._group.together(Resize(self.number, pages, dict(kept), str(self.dtype).removeprefix("torch."))):
            pass
