"""The shard of a model that each rank has, and how a rank reads it.

Attention is divided by key/value heads together with the query heads that read them. The MLP is divided by its
intermediate size, and both outputs by columns of the residual stream. So every matrix is cut by rows, and no sum
crosses ranks: each number is computed by one rank exactly as one process computes it.

That costs two gathers per block where partial sums would cost one all-reduce. In exchange every bit is that of one
process. Other rounding would reach the int8 activations of quantised weights, which amplify it: about one in thirty
greedy tokens would differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from specengine._C import PANEL
from specengine.models.checkpoint import Checkpoint
from specengine.models.checkpoint_base import CPU
from specengine.models.config import ModelConfig
from specengine.models.weights import WeightLoader
from specengine.ops import native
from specengine.ops.decoder import PLAIN
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class ShardedProjection(Projection):
    """A rank's rows of a projection whose input columns are divided among the ranks as well.

    columns_of, rows_of: the number of columns and rows of each rank.
    """

    columns_of: tuple[int, ...] = ()
    rows_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardBounds:
    """The bounds of all shards: entry r is where rank r's shard begins, the last entry is the end.

    heads: key/value heads.  inner: columns of the intermediate size.  hidden: columns of the residual stream.
    Where the division is uneven, rank 0 gets the least, because it also computes the head.
    """

    heads: tuple[int, ...]
    inner: tuple[int, ...]
    hidden: tuple[int, ...]

    @staticmethod
    def of(config: ModelConfig, size: int) -> ShardBounds:
        """Divides a model among `size` ranks. Raises ValueError where a rank would get an empty shard."""
        if config.moe is not None:
            raise ValueError("tensor_parallel: expected 1 for a mixture of experts, whose experts are not divided yet")
        if config.multipliers != PLAIN:
            raise ValueError(f"tensor_parallel: expected 1 for {config.architecture}, whose multipliers no rank knows")
        heads, inner, hidden = config.num_kv_heads, config.intermediate_size, config.hidden_size
        if min(heads, inner // PANEL, hidden // PANEL) < size:
            raise ValueError(
                f"tensor_parallel: {size} processes cannot share {heads} key/value heads, {inner} intermediate and "
                f"{hidden} hidden columns (at least 1, {PANEL} and {PANEL} for each)"
            )
        return ShardBounds(_divided(heads, size, 1), _divided(inner, size, PANEL), _divided(hidden, size, PANEL))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.heads) - 1

    def config(self, rank: int, whole: ModelConfig) -> ModelConfig:
        """Returns the configuration of a rank's attention and MLP."""
        heads = self.heads[rank + 1] - self.heads[rank]
        inner = self.inner[rank + 1] - self.inner[rank]
        group = whole.num_heads // whole.num_kv_heads
        return replace(whole, num_heads=heads * group, num_kv_heads=heads, intermediate_size=inner)


class ShardLoader(WeightLoader):
    """Reads one rank's shard of every layer, for the CPU; embedding, norms and head are read whole."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, bounds: ShardBounds, rank: int) -> None:
        super().__init__(checkpoint, dtype, CPU, native)
        c = checkpoint.config
        keys = tuple(c.head_dim * head for head in bounds.heads)
        queries = tuple(c.num_heads // c.num_kv_heads * column for column in keys)
        self._rank = rank
        self._row_bounds = {
            "q_proj": queries,
            "k_proj": keys,
            "v_proj": keys,
            "o_proj": bounds.hidden,
            "gate_proj": bounds.inner,
            "up_proj": bounds.inner,
            "down_proj": bounds.hidden,
        }
        self._column_bounds = {"o_proj": queries, "down_proj": bounds.inner}

    def linear(self, *names: str) -> Projection:
        projection = super().linear(*names)
        kind = _kind(names[0])
        if kind not in self._column_bounds:
            return projection
        columns, rows = _sizes(self._column_bounds[kind]), _sizes(self._row_bounds[kind])
        return ShardedProjection(
            projection.weights, projection.bias, projection.columns, projection.float_rows, columns, rows
        )

    def _bias(self, name: str) -> torch.Tensor:
        own = self._own_rows(name)
        return super()._bias(name)[own.start : own.stop]

    def _rows(self, name: str) -> int:
        return len(self._own_rows(name))

    def _pack(self, name: str, start: int, stop: int, weight: Weight, first: int) -> None:
        begin = self._own_rows(name.removesuffix(".weight")).start
        super()._pack(name, begin + start, begin + stop, weight, first)

    def _own_rows(self, name: str) -> range:
        """This rank's rows of a matrix."""
        bounds = self._row_bounds.get(_kind(name))
        return range(super()._rows(name)) if bounds is None else range(bounds[self._rank], bounds[self._rank + 1])


def _divided(count: int, size: int, unit: int) -> tuple[int, ...]:
    begins = [unit * (count // unit * rank // size) for rank in range(size)]
    return (*begins, count)


def _sizes(bounds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in pairwise(bounds))


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
