"""A model whose layers are divided among processes, as its first rank sees it: with the interface of a Transformer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.cache.page_pool import page_bytes
from specengine.cache.state_pool import StatePool
from specengine.models.checkpoint import Checkpoint
from specengine.models.checkpoint_base import CPU
from specengine.models.config import ModelConfig
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.models.transformer import Transformer
from specengine.models.weights import ModelWeights
from specengine.ops import Ops, native
from specengine.ops.decoder import Pass, Rows
from specengine.ops.gated_delta.matrices import NO_STATES
from specengine.ops.lora.matrices import LoraLayer
from specengine.ops.verify_tree import Accepted
from specengine.tensor_parallel.group import Group
from specengine.tensor_parallel.messages import Compact, Forward, PassStates, Resize
from specengine.tensor_parallel.parallel_states import ParallelStates
from specengine.tensor_parallel.shard_decoder import shard_decoder
from specengine.tensor_parallel.shards import ShardBounds, ShardLoader


class ParallelTransformer(Transformer):
    """Rank 0: its shard of the layers, and the whole embedding, final norm and head.

    The other ranks have only their shards, and only run passes. Passes raise RankFailed where a process fails.
    """

    def __init__(
        self,
        weights: ModelWeights,
        group: Group,
        bounds: ShardBounds,
        *,
        rope: RopeTables | None = None,
        hidden_state_layers: Sequence[int] = (),
    ) -> None:
        self.tensor_parallel = bounds.size
        self._group = group
        self._bounds = bounds
        super().__init__(weights, CPU, native, rope=rope, hidden_state_layers=hidden_state_layers)

    @property
    def failure(self) -> str | None:
        return self._group.failure

    def _new_decoder(self) -> Pass:
        part = self._bounds.config(0, self.config)
        return shard_decoder(native, self._group.gather, part, self._layers, self.final_norm, self.hidden_state_layers)

    def with_hidden_state_layers(self, layers: Sequence[int]) -> Transformer:
        if tuple(layers) == self.hidden_state_layers:
            return self
        return ParallelTransformer(self.weights, self._group, self._bounds, rope=self._rope, hidden_state_layers=layers)

    def with_lora(self, lora: Sequence[LoraLayer]) -> Transformer:
        """Raises ValueError: no process has the whole matrices that an adapter belongs to."""
        raise ValueError("adapters: a target under tensor_parallel cannot have any")

    def first_layers(self, count: int) -> Transformer:
        """Raises ValueError: this process has no whole layer to draft with."""
        raise ValueError("drafter: a target under tensor_parallel has no layers of its own to draft with")

    def new_cache(self, pages: int | None = None, requests: int | None = None) -> KVCache:
        if pages is not None:
            raise ValueError("pages: under tensor_parallel caches grow on demand, got a fixed number")
        return ParallelCache(self._group, self.config, self._bounds, self.cache_dtype)

    def hidden_states(self, tree: Rows, cache: KVCache, batch: CacheBatch, first_node: int = 0) -> HiddenStates:
        assert isinstance(cache, ParallelCache) and not first_node  # made by new_cache(); whole trees alone
        hidden = self.config.hidden_size
        inputs = torch.empty(len(tree.tokens), hidden)
        self.ops.layer.gather_rows(self.embedding, tree.tokens, inputs)
        shape = (len(tree.tokens), len(self.hidden_state_layers), hidden)
        at_layers = torch.empty(shape) if self.hidden_state_layers else None
        cos, sin = self._rope.cos_sin
        states, of_ranks = NO_STATES, None
        if cache.states is not None and batch.states is not None:
            states = cache.states.of_pass(batch.states, len(tree.tokens), tree.ancestors is not None)
            of_ranks = PassStates(batch.states.slots.numpy(), states.final)
        cache.send_changes()
        message = Forward(
            cache=cache.number,
            inputs=inputs.numpy(),
            depths=tree.depths.numpy(),
            row_start=tree.row_start.numpy(),
            ancestors=None if tree.ancestors is None else tree.ancestors.numpy(),
            block_table=batch.block_table.numpy(),
            lengths=batch.lengths.numpy(),
            positions=len(cos),
            states=of_ranks,
        )
        place = (cache.k, cache.v, batch.block_table, batch.lengths)
        with self._group.broadcast(message):
            last = self._decoder(tree, *place, cos, sin, at_layers, inputs, states=states)
        return HiddenStates(last, at_layers)


class ParallelCache(KVCache):
    """The first rank's part of a cache. It decides for all ranks; the other parts follow its messages.

    Only passes read the other parts, so nothing is sent when a request starts: no error of another rank can come there.
    """

    def __init__(self, group: Group, whole: ModelConfig, bounds: ShardBounds, dtype: torch.dtype) -> None:
        self._group = group
        self.number = group.new_cache()
        self._whole = (whole.attention_layers, whole.num_kv_heads, whole.head_dim)
        part = bounds.config(0, whole)
        self._memory = None if bounds.delta is None else ParallelStates(group, bounds.delta, self.number)
        self._sizes: list[Resize] = []  # since the last pass
        states = None if self._memory is None else StatePool(self._memory)
        super().__init__(part.attention_layers, part.num_kv_heads, part.head_dim, dtype, CPU, states=states)
        weakref.finalize(self, group.drop_cache, self.number).atexit = False

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all ranks together."""
        return page_bytes(self._whole, self.dtype)

    def compact(self, batch: CacheBatch, accepted: Accepted, ops: Ops) -> None:
        message = Compact(
            cache=self.number,
            block_table=batch.block_table.numpy(),
            lengths=batch.lengths.numpy(),
            path=accepted.path.numpy(),
            path_length=accepted.path_length.numpy(),
        )
        with self._group.broadcast(message):
            super().compact(batch, accepted, ops)

    def send_changes(self) -> None:
        """Sends the other ranks what happened to pages and recurrent states since the last call. Raises RankFailed."""
        while self._sizes:
            with self._group.broadcast(self._sizes[0]):
                self._sizes.pop(0)
        if self._memory is not None:
            self._memory.send_moves()

    def _resize(self, pages: int, kept: Mapping[int, int]) -> None:
        super()._resize(pages, kept)  # first: without memory it raises, and no other part will change
        self._sizes.append(Resize(self.number, pages, dict(kept), str(self.dtype).removeprefix("torch.")))


def load_parallel_transformer(checkpoint: Checkpoint, path: str, dtype: str, size: int) -> ParallelTransformer:
    """Starts the other ranks and reads this rank's shard meanwhile. path: the checkpoint's, for the other ranks.

    Raises ValueError for a model that cannot be divided among `size` ranks, RankFailed where a process fails.
    """
    bounds = ShardBounds.of(checkpoint.config, size)
    group = Group(size, path, dtype)
    try:
        target = ParallelTransformer(ShardLoader(checkpoint, dtype, bounds, rank=0).model(), group, bounds)
    except BaseException:
        group.close()
        raise
    group.join()
    return target
