"""The shard of a model that each rank has, and how a rank reads it.

Attention is divided by key/value heads together with the query heads that read them. The MLP is divided by its
intermediate size, and both outputs by columns of the residual stream. Every expert of a mixture is divided as an MLP
is, and every rank routes all rows. A gated delta rule is divided by key heads together with their value heads. So every
matrix is cut by rows, and no sum crosses ranks: each number is computed by one rank exactly as one process computes it.

That costs two gathers per block where partial sums would cost one all-reduce. In exchange every bit is that of one
process. Other rounding would reach the int8 activations of quantised weights, which amplify it: about one in thirty
greedy tokens would differ.

Without strict arithmetic, which a GPU alone has, float matrices behind attention and MLP are cut by columns instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specengine._C import PANEL
from specengine.models.checkpoint import Checkpoint
from specengine.models.checkpoint_base import CPU
from specengine.models.config import ModelConfig, MoeConfig
from specengine.models.weights import WeightLoader, steps
from specengine.ops import Ops, native
from specengine.ops.decoder import Layer
from specengine.ops.experts.moe import ExpertProjection, Moe
from specengine.ops.weight import FLOAT_FORMATS, Projection, Weight
from specengine.tensor_parallel.delta_shards import DeltaShards, Parts, sizes
from specengine.utils.gated_delta_config import GatedDeltaConfig
from specengine.utils.multipliers import PLAIN


@dataclass(frozen=True)
class ShardedProjection(Projection):
    """A rank's rows of a projection whose input columns are divided among the ranks as well.

    columns_of, rows_of: the number of columns and rows of each rank.  order: where each input column lies among the
    columns of all ranks, int64 [C]; None: in its own place.
    """

    columns_of: tuple[int, ...] = ()
    rows_of: tuple[int, ...] = ()
    order: torch.Tensor | None = None

    @property
    def crosses_ranks(self) -> bool:
        return True


@dataclass(frozen=True)
class SummedProjection(Projection):
    """A rank's columns of a projection; the sum over all ranks is the product. Rank 0 has the bias."""

    @property
    def crosses_ranks(self) -> bool:
        return True


@dataclass(frozen=True)
class ShardedExperts(ExpertProjection):
    """A rank's rows of every expert's projection. columns_of, rows_of: as in ShardedProjection."""

    columns_of: tuple[int, ...] = ()
    rows_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardBounds:
    """The bounds of all shards: entry r is where rank r's shard begins, the last entry is the end.

    heads: key/value heads.  inner: columns of the intermediate size; expert, shared: of experts and of the shared one.
    hidden: columns of the residual stream.  delta: of layers of gated delta rule.  Where the division is uneven,
    rank 0 gets the least, because it also computes the head.
    """

    heads: tuple[int, ...]
    inner: tuple[int, ...]
    hidden: tuple[int, ...]
    expert: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    delta: DeltaShards | None = None

    @staticmethod
    def of(config: ModelConfig, size: int) -> ShardBounds:
        """Divides a model among `size` ranks. Raises ValueError where a rank would get an empty shard."""
        if config.multipliers != PLAIN:
            raise ValueError(f"tensor_parallel: expected 1 for {config.architecture}, multipliers are not supported")
        if config.whole_qk_norm:
            raise ValueError(f"tensor_parallel: expected 1 for {config.architecture}, whose norms read all heads")
        moe, heads, hidden = config.moe, config.num_kv_heads, config.hidden_size
        dense = moe is None or len(moe.dense_layers) > 0
        expert, shared = (moe.intermediate_size, moe.shared_size) if moe else (0, 0)
        least = min(each for each in (dense * config.intermediate_size, expert, shared) if each)
        if min(heads, least // PANEL, hidden // PANEL) < size:
            raise ValueError(
                f"tensor_parallel: {size} processes cannot share {heads} key/value heads, {least} intermediate and "
                f"{hidden} hidden columns (at least 1, {PANEL} and {PANEL} for each)"
            )
        delta = config.gated_delta
        if delta is not None and delta.num_key_heads < size:
            raise ValueError(
                f"tensor_parallel: {size} processes cannot share {delta.num_key_heads} key heads of layers of gated "
                "delta rule (at least 1 for each)"
            )
        inner, outer = (_divided(each, size, PANEL) for each in (config.intermediate_size, hidden))
        of_expert, of_shared = (_divided(each, size, PANEL) if each else () for each in (expert, shared))
        recurrent = None if delta is None else DeltaShards(delta, _divided(delta.num_key_heads, size, 1))
        return ShardBounds(_divided(heads, size, 1), inner, outer, of_expert, of_shared, recurrent)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.heads) - 1

    def config(self, rank: int, whole: ModelConfig) -> ModelConfig:
        """Returns the configuration of a rank's attention, gated delta rule and MLP."""
        heads = self.heads[rank + 1] - self.heads[rank]
        inner = self.inner[rank + 1] - self.inner[rank]
        group = whole.num_heads // whole.num_kv_heads
        delta = None if self.delta is None else self.delta.config(rank)
        return replace(whole, num_heads=heads * group, num_kv_heads=heads, intermediate_size=inner, gated_delta=delta)


class ShardLoader(WeightLoader):
    """Reads one rank's shard of every layer; embedding, norms and head are read whole."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        bounds: ShardBounds,
        rank: int,
        device: torch.device = CPU,
        ops: Ops = native,
    ) -> None:
        super().__init__(checkpoint, dtype, device, ops)
        c = checkpoint.config
        group, dim = c.num_heads // c.num_kv_heads, c.head_dim
        keys = tuple(dim * head for head in bounds.heads)
        queries = tuple(group * column for column in keys)
        gated = tuple(2 * column for column in queries) if c.attention_gate else queries
        self._bounds, self._rank = bounds, rank
        self._row_bounds: dict[str, Parts] = {
            "q_proj": (gated,),
            "k_proj": (keys,),
            "v_proj": (keys,),
            "sinks": (tuple(group * head for head in bounds.heads),),
            **dict.fromkeys(("o_proj", "out_proj", "down_proj"), (bounds.hidden,)),
        }
        self._column_bounds = {"o_proj": queries}
        self._orders: dict[str, torch.Tensor | None] = {}
        if bounds.delta is not None:
            self._row_bounds |= bounds.delta.row_bounds()
            self._column_bounds["out_proj"] = bounds.delta.column_bounds()
            self._orders["out_proj"] = bounds.delta.column_order()

    def layer_at(
        self, prefix: str, window: int = 0, moe: MoeConfig | None = None, delta: GatedDeltaConfig | None = None
    ) -> Layer:
        own = None if delta is None or self._bounds.delta is None else self._bounds.delta.config(self._rank)
        return super().layer_at(prefix, window, moe, own)

    def linear(self, *names: str) -> Projection:
        columns = self._columns_of(names[0])
        (form, *_) = self._formats.of_product(names)
        if columns and not self.ops.strict and form in FLOAT_FORMATS:
            return self._summed(names[0], columns, form)
        projection = super().linear(*names)
        if not columns:
            return projection
        kind = _kind(names[0])
        (rows,) = map(sizes, self._row_bounds[kind])
        whole = (projection.weights, projection.bias, projection.columns, projection.float_rows)
        return ShardedProjection(*whole, columns, rows, self._orders.get(kind))

    def _summed(self, name: str, columns: tuple[int, ...], form: str) -> SummedProjection:
        """Reads this rank's columns of a matrix."""
        begin = sum(columns[: self._rank])
        rows, all_columns = self.checkpoint.tensors[f"{name}.weight"].shape
        weight = self.ops.empty_weight(rows, columns[self._rank], form, self.device)
        self.formats.add(form)
        for start, stop in steps(rows, all_columns):
            block = self.checkpoint.read_rows(f"{name}.weight", start, stop, self.device)
            self.ops.pack_linear(block[:, begin : begin + columns[self._rank]].contiguous(), weight, start)
        biased = self._rank == 0 and f"{name}.bias" in self.checkpoint.tensors
        return SummedProjection((weight,), super()._bias(name) if biased else None)

    def experts(self, prefix: str, moe: MoeConfig) -> Moe:
        whole = super().experts(prefix, moe)
        columns, rows = sizes(self._bounds.expert), sizes(self._bounds.hidden)
        down = whole.down
        sharded = ShardedExperts(down.weights, down.rows, down.bias, down.float_rows, columns, rows)
        return replace(whole, intermediate=columns[self._rank], down=sharded)

    def vector(self, name: str) -> torch.Tensor:
        vector, parts = super().vector(name), self._row_bounds.get(_kind(name.removesuffix(".weight")))
        return vector if parts is None else _cut(vector, self._own(parts))

    def _columns_of(self, name: str) -> tuple[int, ...]:
        """The columns of each rank of a matrix whose input is divided; of any other none."""
        bounds = self._inner(name) if _kind(name) == "down_proj" else self._column_bounds.get(_kind(name))
        return () if bounds is None else sizes(bounds)

    def _inner(self, name: str) -> tuple[int, ...]:
        if ".mlp.experts." in name:
            return self._bounds.expert
        return self._bounds.shared if ".mlp.shared_expert." in name else self._bounds.inner

    def _bias(self, name: str) -> torch.Tensor:
        return _cut(super()._bias(name), self._own_rows(name))

    def _rows(self, name: str) -> int:
        return sum(map(len, self._own_rows(name)))

    def _pack(self, name: str, start: int, stop: int, weight: Weight, first: int, order: torch.Tensor | None) -> None:
        at = 0
        for own in self._own_rows(name.removesuffix(".weight")):
            low, high = max(start, at), min(stop, at + len(own))
            if low < high:
                begin = own.start - at
                super()._pack(name, begin + low, begin + high, weight, first + low - start, order)
            at += len(own)

    def _own_rows(self, name: str) -> tuple[range, ...]:
        """This rank's rows of a matrix, in order."""
        kind = _kind(name)
        if kind in ("gate_proj", "up_proj"):
            return self._own((self._inner(name),))
        parts = self._row_bounds.get(kind)
        return (range(super()._rows(name)),) if parts is None else self._own(parts)

    def _own(self, parts: Parts) -> tuple[range, ...]:
        return tuple(range(*bounds[self._rank : self._rank + 2]) for bounds in parts)


def _divided(count: int, size: int, unit: int) -> tuple[int, ...]:
    begins = [unit * (count // unit * rank // size) for rank in range(size)]
    return (*begins, count)


def _cut(rows: torch.Tensor, own: tuple[range, ...]) -> torch.Tensor:
    return torch.cat([rows[part.start : part.stop] for part in own])


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
