"""Which part of a model each rank has, and how it is read.

Attention is divided by key/value heads, with the query heads that read them, the MLP by its intermediate size. So q, k,
v, gate and up are cut by rows; o and down by columns, and what they give is a summand: the ranks' sum is the product.
Every format keeps the codes and scales that it has in one process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specengine._C import BLOCK, PANEL
from specengine.models.checkpoint import Checkpoint
from specengine.models.config import ModelConfig
from specengine.models.weights import WeightLoader
from specengine.ops import Ops
from specengine.ops.weight import Projection, Weight

_STEP_ELEMENTS = 2 << 20  # of a weight cut by columns, whose rows are packed whole


@dataclass(frozen=True)
class Summand(Projection):
    """A projection that gives one rank's summand of the result."""


@dataclass(frozen=True)
class Part:
    """Of one rank.  heads: key/value heads.  inner: columns of the intermediate size."""

    rank: int
    heads: range
    inner: range

    def config(self, whole: ModelConfig) -> ModelConfig:
        """What the layers of this part look like."""
        heads, group = len(self.heads), whole.num_heads // whole.num_kv_heads
        return replace(whole, num_heads=heads * group, num_kv_heads=heads, intermediate_size=len(self.inner))


def parts_of(config: ModelConfig, size: int) -> list[Part]:
    """The parts of `size` ranks, uneven where they must be: the first rank, which also has the head, gets the least.

    Raises ValueError where there is not something for everyone.
    """
    heads, blocks = config.num_kv_heads, config.intermediate_size // BLOCK
    if min(heads, blocks) < size:
        raise ValueError(
            f"tensor_parallel: the model has {heads} key/value heads and {blocks} blocks of {BLOCK} intermediate "
            f"columns, which cannot be divided among {size} processes"
        )
    of_heads = [heads * rank // size for rank in range(size + 1)]
    of_inner = [BLOCK * (blocks * rank // size) for rank in range(size)] + [config.intermediate_size]
    return [
        Part(rank, range(of_heads[rank], of_heads[rank + 1]), range(of_inner[rank], of_inner[rank + 1]))
        for rank in range(size)
    ]


class ShardLoader(WeightLoader):
    """Reads one rank's part of every layer; embedding, norms and head are whole."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: torch.device, ops: Ops, part: Part) -> None:
        super().__init__(checkpoint, dtype, device, ops)
        c = checkpoint.config
        self._first = part.rank == 0
        self._head_columns = c.num_heads // c.num_kv_heads * c.head_dim  # of the query heads of a key/value head
        queries, keys = (
            range(part.heads.start * width, part.heads.stop * width) for width in (self._head_columns, c.head_dim)
        )
        self._rows_kept = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self._rows_kept |= dict.fromkeys(("gate_proj", "up_proj"), part.inner)
        self._columns_kept = {"o_proj": queries, "down_proj": part.inner}

    def linear(self, *names: str) -> Projection:
        projection = super().linear(*names)
        if _kind(names[0]) not in self._columns_kept:
            return projection
        return Summand(projection.weights, projection.bias if self._first else None)

    def _bias(self, name: str) -> torch.Tensor:
        kept = self._rows_kept.get(_kind(name))
        bias = self.vector(f"{name}.bias")
        return bias if kept is None else bias[kept.start : kept.stop]

    def _rows(self, name: str) -> int:
        kept = self._rows_kept.get(_kind(name))
        return super()._rows(name) if kept is None else len(kept)

    def _pack(self, name: str, start: int, stop: int, weight: Weight, first: int) -> None:
        kept = self._rows_kept.get(_kind(name.removesuffix(".weight")))
        begin = 0 if kept is None else kept.start
        super()._pack(name, begin + start, begin + stop, weight, first)

    def _weight(self, names: list[str], form: str) -> Weight:
        kept = self._columns_kept.get(_kind(names[0]))
        return super()._weight(names, form) if kept is None else self._cut_weight(names[0], form, kept)

    def _cut_weight(self, name: str, form: str, kept: range) -> Weight:
        rows, columns = self.checkpoint.tensors[f"{name}.weight"].shape
        weight = self.ops.empty_weight(rows, len(kept), form, self.device)
        self.formats.add(form)
        block = BLOCK if weight.quantised else 1
        if self._head_columns % block:
            raise ValueError(
                f"tensor_parallel: the query heads of a key/value head have {self._head_columns} columns, which do not "
                f"fill quantised blocks of {block}; a float dtype can be divided"
            )
        # Packed whole and cut then: blocks of a file may be longer than those they become.
        step = max(1, _STEP_ELEMENTS // (PANEL * columns)) * PANEL
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            whole = self.ops.empty_weight(stop - start, columns, form, self.device)
            self._pack(f"{name}.weight", start, stop, whole, 0)
            first = start // PANEL
            weight.data[first : first + len(whole.data)] = whole.data[:, kept.start // block : -(-kept.stop // block)]
        return weight


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
