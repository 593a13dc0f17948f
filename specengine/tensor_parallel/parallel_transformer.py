"""A model whose layers are divided among processes, as its first rank sees it: with the interface of a Transformer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.cache.page_pool import page_bytes
from specengine.cache.state_pool import StatePool, fixed_slots
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import Checkpoint
from specengine.models.config import ModelConfig
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.models.transformer import Transformer, chains_of
from specengine.models.weights import ModelWeights
from specengine.ops import Ops
from specengine.ops.decoder import Pass, Rows
from specengine.ops.gated_delta.matrices import NO_STATES
from specengine.ops.lora.matrices import LoraLayer
from specengine.ops.verify_tree import Accepted
from specengine.tensor_parallel.device.passes import DevicePasses
from specengine.tensor_parallel.group import Group
from specengine.tensor_parallel.messages import OpenCache, PassStates, ReleasePages
from specengine.tensor_parallel.parallel_states import ParallelStates
from specengine.tensor_parallel.passes import HostPasses, Passes, RankPass
from specengine.tensor_parallel.shard_decoder import shard_decoder
from specengine.tensor_parallel.shards import ShardBounds, ShardLoader
from specengine.utils.cuda_graphs import DeviceGraphs


class ParallelTransformer(Transformer):
    """Rank 0: its shard of the layers, and the whole embedding, final norm and head.

    The other ranks have only their shards, and only run passes. Passes raise RankFailed where a process fails.
    """

    def __init__(
        self,
        weights: ModelWeights,
        device: torch.device,
        ops: Ops,
        group: Group,
        passes: Passes,
        bounds: ShardBounds,
        *,
        rope: RopeTables | None = None,
        hidden_state_layers: Sequence[int] = (),
    ) -> None:
        self.tensor_parallel = bounds.size
        self._group, self._passes, self._bounds = group, passes, bounds
        super().__init__(weights, device, ops, rope=rope, hidden_state_layers=hidden_state_layers)

    @property
    def failure(self) -> str | None:
        return self._group.failure

    def _new_decoder(self) -> Pass:
        part, layers = self._bounds.config(0, self.config), self.hidden_state_layers
        parts = part, self._layers, self.final_norm, layers, self._out_dtype
        return shard_decoder(self.ops, self._passes.gather, self._passes.add, *parts)

    @property
    def graphs(self) -> DeviceGraphs:
        return self._passes if isinstance(self._passes, DevicePasses) else super().graphs

    def with_hidden_state_layers(self, layers: Sequence[int]) -> Transformer:
        if tuple(layers) == self.hidden_state_layers:
            return self
        of_ranks = self._group, self._passes, self._bounds
        own: dict[str, Any] = {"rope": self._rope, "hidden_state_layers": layers}
        return ParallelTransformer(self.weights, self.device, self.ops, *of_ranks, **own)

    def with_lora(self, lora: Sequence[LoraLayer]) -> Transformer:
        """Raises ValueError: no process has the whole matrices that an adapter belongs to."""
        raise ValueError("adapters: a target under tensor_parallel cannot have any")

    def first_layers(self, count: int) -> Transformer:
        """Raises ValueError: this process has no whole layer to draft with."""
        raise ValueError("drafter: a target under tensor_parallel has no layers of its own to draft with")

    def new_cache(self, pages: int | None = None, requests: int | None = None) -> KVCache:
        """As Transformer's."""
        of_ranks = self._group, self._passes, self._bounds
        return ParallelCache(*of_ranks, self.config, self.cache_dtype, self.device, pages, requests)

    @property
    def page_bytes(self) -> int:
        return max(
            page_bytes(_page_shape(self._bounds.config(rank, self.config)), self.cache_dtype)
            for rank in range(self.tensor_parallel)
        )

    def hidden_states(self, tree: Rows, cache: KVCache, batch: CacheBatch, first_node: int = 0) -> HiddenStates:
        assert isinstance(cache, ParallelCache) and not first_node  # made by new_cache(); whole trees alone
        hidden = self.config.hidden_size
        inputs = torch.empty(len(tree.tokens), hidden, device=self.device)
        self.ops.layer.gather_rows(self.embedding, tree.tokens, inputs)
        shape = (len(tree.tokens), len(self.hidden_state_layers), hidden)
        at_layers = torch.empty(shape, device=self.device) if self.hidden_state_layers else None
        cos, sin = self._rope.cos_sin
        states, of_ranks = NO_STATES, None
        if cache.states is not None and batch.states is not None:
            states = cache.states.of_pass(batch.states, len(tree.tokens), tree.ancestors is not None)
            of_ranks = PassStates(batch.states.slots.numpy(), states.final)
        chains = chains_of(tree, batch) if self.ops.on_device and isinstance(tree, TreeBatch) else None
        known: dict[str, Any] = {} if chains is None else {"chains": chains}
        cache.send_changes()
        place = (cache.k, cache.v, batch.block_table, batch.lengths)
        with self._passes.run(RankPass(cache.number, tree, batch, inputs, len(cos), chains, of_ranks)):
            last = self._decoder(tree, *place, cos, sin, at_layers, inputs, states=states, **known)
        return HiddenStates(last, at_layers)


class ParallelCache(KVCache):
    """The first rank's part of a cache. It decides for all ranks; the other parts follow its messages.

    Only passes read the other parts, so nothing is sent when a request starts: no error of another rank can come there.
    """

    def __init__(
        self,
        group: Group,
        passes: Passes,
        bounds: ShardBounds,
        whole: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        pages: int | None = None,
        requests: int | None = None,
    ) -> None:
        self._group, self._passes = group, passes
        self.number = group.new_cache()
        self._whole = _page_shape(whole)
        part = bounds.config(0, whole)
        self._memory, states = None, None
        if bounds.delta is not None:
            slots = None if requests is None else fixed_slots(requests)
            self._memory = ParallelStates(group, bounds.delta, self.number, slots)
            states = StatePool(self._memory, requests)
        super().__init__(*_page_shape(part), dtype, device, pages, states)
        kept = 0 if self._memory is None else self._memory.slots
        opened = OpenCache(self.number, self.k.shape[1], kept, str(dtype).removeprefix("torch."))
        self._changes: list[OpenCache | ReleasePages] = [opened]  # since the last pass
        weakref.finalize(self, group.drop_cache, self.number).atexit = False

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all ranks together."""
        return page_bytes(self._whole, self.dtype)

    def compact(self, batch: CacheBatch, accepted: Accepted, ops: Ops) -> None:
        with self._passes.compact(self.number, batch, accepted):
            super().compact(batch, accepted, ops)

    def send_changes(self) -> None:
        """Sends the other ranks what happened to pages and recurrent states since the last call. Raises RankFailed."""
        while self._changes:
            with self._group.broadcast(self._changes[0]):
                self._changes.pop(0)
        if self._memory is not None:
            self._memory.send_moves()

    def _release(self, pages: list[int]) -> None:
        super()._release(pages)
        if pages:
            self._changes.append(ReleasePages(self.number, tuple(pages)))


def _page_shape(config: ModelConfig) -> tuple[int, int, int]:
    return config.attention_layers, config.num_kv_heads, config.head_dim


def load_parallel_transformer(
    checkpoint: Checkpoint, path: str, dtype: str, size: int, device: torch.device, ops: Ops
) -> ParallelTransformer:
    """Starts the other ranks and reads this rank's shard meanwhile.

    path: the checkpoint's, for the other ranks.  device: of this rank; the others have those behind it.
    Raises ValueError for a model that cannot be divided among `size` ranks, RankFailed where a process fails.
    """
    bounds = ShardBounds.of(checkpoint.config, size)
    if ops.on_device and bounds.delta is not None:
        raise ValueError(f"tensor_parallel: expected 1 for {checkpoint.config.architecture} on a GPU")
    group = Group(size, path, dtype, device, ops.strict)
    try:
        weights = ShardLoader(checkpoint, dtype, bounds, 0, device, ops).model()
        group.join()
        passes = DevicePasses(group, size, device) if ops.on_device else HostPasses(group)
        return ParallelTransformer(weights, device, ops, group, passes, bounds)
    except BaseException:
        group.close()
        raise
