"""How a pass of the first rank reaches the other ranks; on the CPU its rows go with the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.ops.decoder import Rows
from specengine.ops.prefill.chains import PromptChains
from specengine.ops.verify_tree import Accepted
from specengine.tensor_parallel.group import Group
from specengine.tensor_parallel.messages import Compact, Forward, PassStates

Gather = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
Add = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class RankPass:
    """A pass of all ranks over the M rows of a tree.

    cache: its number.  inputs: float32 [M, hidden], the embedded tokens.  positions: the length that the rotary tables
    must have.  chains: see tree_attention_cuda.  states: of a hybrid.
    """

    cache: int
    tree: Rows
    batch: CacheBatch
    inputs: torch.Tensor
    positions: int
    chains: PromptChains | None = None
    states: PassStates | None = None


class Passes(Protocol):
    """The first rank's side of passes.

    gather: puts all ranks' columns side by side.  add: adds up all ranks' products, where parts are cut so.
    """

    gather: Gather
    add: Add | None

    def run(self, rank_pass: RankPass) -> AbstractContextManager[None]:
        """Runs a pass in the other ranks; the body runs this rank's part. Raises RankFailed."""
        ...

    def compact(self, cache: int, batch: CacheBatch, accepted: Accepted) -> AbstractContextManager[None]:
        """Compacts paths of the last pass in the other ranks; the body does so here. Raises RankFailed."""
        ...


class HostPasses:
    """Passes of the CPU."""

    add: Add | None = None

    def __init__(self, group: Group) -> None:
        self._group = group
        self.gather: Gather = group.gather

    @contextmanager
    def run(self, rank_pass: RankPass) -> Iterator[None]:
        tree, batch = rank_pass.tree, rank_pass.batch
        message = Forward(
            cache=rank_pass.cache,
            inputs=rank_pass.inputs.numpy(),
            depths=tree.depths.numpy(),
            row_start=tree.row_start.numpy(),
            ancestors=None if tree.ancestors is None else tree.ancestors.numpy(),
            block_table=batch.block_table.numpy(),
            lengths=batch.lengths.numpy(),
            positions=rank_pass.positions,
            states=rank_pass.states,
        )
        with self._group.broadcast(message):
            yield

    @contextmanager
    def compact(self, cache: int, batch: CacheBatch, accepted: Accepted) -> Iterator[None]:
        message = Compact(
            cache=cache,
            block_table=batch.block_table.numpy(),
            lengths=batch.lengths.numpy(),
            path=accepted.path.numpy(),
            path_length=accepted.path_length.numpy(),
        )
        with self._group.broadcast(message):
            yield
