"""Which part of a model each rank has, and how it is read.

Attention is divided by key/value heads, with the query heads that read them, the MLP by its intermediate size, and what
both add to the residual stream by its columns. So every matrix is cut by rows, and no sum ever crosses ranks: the ranks
tell each other results, each of which one of them has computed as one process computes it. That costs two gathers per
block where summands would cost one all-reduce. In exchange every bit is that of one process: rounding otherwise would
reach the int8 activations of quantised weights, which amplify it until one likeliest token in some thirty is another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from specengine._C import PANEL
from specengine.models.checkpoint import Checkpoint
from specengine.models.config import ModelConfig
from specengine.models.weights import WeightLoader
from specengine.ops import Ops
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class Joint(Projection):
    """A projection of which every rank has some rows, of what all ranks have some columns of.

    columns_of, rows_of: how many of each rank.
    """

    columns_of: tuple[int, ...]
    rows_of: tuple[int, ...]


@dataclass(frozen=True)
class Parts:
    """Of all ranks: where the ones of each begin, and the end.

    heads: key/value heads.  inner: columns of the intermediate size.  hidden: columns of the residual stream.
    Uneven where they must be: the first rank, which also has the head, gets the least.
    """

    heads: tuple[int, ...]
    inner: tuple[int, ...]
    hidden: tuple[int, ...]

    @staticmethod
    def of(config: ModelConfig, size: int) -> Parts:
        """Raises ValueError where there is not something of each for everyone."""
        heads, inner, hidden = config.num_kv_heads, config.intermediate_size, config.hidden_size
        if min(heads, inner // PANEL, hidden // PANEL) < size:
            raise ValueError(
                f"tensor_parallel: {size} processes cannot share {heads} key/value heads, {inner} intermediate and "
                f"{hidden} hidden columns (at least 1, {PANEL} and {PANEL} for each)"
            )
        return Parts(_divided(heads, size, 1), _divided(inner, size, PANEL), _divided(hidden, size, PANEL))

    def config(self, rank: int, whole: ModelConfig) -> ModelConfig:
        """What a rank's attention and MLP look like."""
        heads, group = self.heads[rank + 1] - self.heads[rank], whole.num_heads // whole.num_kv_heads
        inner = self.inner[rank + 1] - self.inner[rank]
        return replace(whole, num_heads=heads * group, num_kv_heads=heads, intermediate_size=inner)


class ShardLoader(WeightLoader):
    """Reads one rank's part of every layer; embedding, norms and head are whole."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, device: torch.device, ops: Ops, parts: Parts, rank: int
    ) -> None:
        super().__init__(checkpoint, dtype, device, ops)
        c, self._rank = checkpoint.config, rank
        keys = tuple(c.head_dim * head for head in parts.heads)
        queries = tuple(c.num_heads // c.num_kv_heads * column for column in keys)
        self._bounds = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self._bounds |= {"gate_proj": parts.inner, "up_proj": parts.inner}
        self._bounds |= {"o_proj": parts.hidden, "down_proj": parts.hidden}
        self._columns = {"o_proj": queries, "down_proj": parts.inner}

    def linear(self, *names: str) -> Projection:
        projection, kind = super().linear(*names), _kind(names[0])
        if kind not in self._columns:
            return projection
        sizes = (_sizes(self._columns[kind]), _sizes(self._bounds[kind]))
        return Joint(projection.weights, projection.bias, *sizes)

    def _bias(self, name: str) -> torch.Tensor:
        kept = self._kept(name)
        return super()._bias(name)[kept.start : kept.stop]

    def _rows(self, name: str) -> int:
        return len(self._kept(name))

    def _pack(self, name: str, start: int, stop: int, weight: Weight, first: int) -> None:
        begin = self._kept(name.removesuffix(".weight")).start
        super()._pack(name, begin + start, begin + stop, weight, first)

    def _kept(self, name: str) -> range:
        """Rows of a matrix that are this rank's."""
        bounds = self._bounds.get(_kind(name))
        return range(super()._rows(name)) if bounds is None else range(bounds[self._rank], bounds[self._rank + 1])


def _divided(count: int, size: int, unit: int) -> tuple[int, ...]:
    return (*(unit * (count // unit * rank // size) for rank in range(size)), count)


def _sizes(bounds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in pairwise(bounds))


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
