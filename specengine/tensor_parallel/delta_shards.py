"""The shards of layers of gated delta rule: key heads with the value heads that read them, and their states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from specengine.utils.gated_delta_config import GatedDeltaConfig

Parts = tuple[tuple[int, ...], ...]  # bounds of the ranks' rows, for each part of a tensor whose parts lie in a row


@dataclass(frozen=True)
class DeltaShards:
    """Divides the heads of layers of gated delta rule.  whole: all heads.  heads: bounds of the ranks' key heads.

    Where value heads are tiled, those of one key head lie apart: a rank has one run of them for each round over the
    key heads, and its own heads are tiled again.
    """

    whole: GatedDeltaConfig
    heads: tuple[int, ...]

    def config(self, rank: int) -> GatedDeltaConfig:
        """Returns the configuration of a rank's heads."""
        count = self.heads[rank + 1] - self.heads[rank]
        return replace(self.whole, num_key_heads=count, num_value_heads=count * self._ratio)

    def row_bounds(self) -> dict[str, Parts]:
        """Returns how the rows of a layer's tensors are divided, by their names less `.weight`."""
        c = self.whole
        keys = _scaled(self.heads, c.key_head_dim)
        mixed = (keys, _behind(c.key_size, keys), *self._values(2 * c.key_size, c.value_head_dim))
        gates = self._values(0, 1)
        return {
            "in_proj_qkv": mixed,
            "conv1d": mixed,
            "in_proj_z": self._values(0, c.value_head_dim),
            **dict.fromkeys(("in_proj_b", "in_proj_a", "decay", "dt_bias"), gates),
        }

    def column_bounds(self) -> tuple[int, ...]:
        """Returns the bounds of the ranks' outputs, side by side."""
        return _scaled(self.heads, self._ratio * self.whole.value_head_dim)

    def column_order(self) -> torch.Tensor | None:
        """Returns where each input of `out_proj` lies among the outputs of all ranks, int64; None: in its place."""
        if not self.whole.tiled:
            return None
        runs = self._values(0, self.whole.value_head_dim)
        ranks = range(len(self.heads) - 1)
        gathered = [torch.arange(*run[rank : rank + 2]) for rank in ranks for run in runs]
        return torch.cat(gathered).argsort()

    @property
    def _ratio(self) -> int:
        return self.whole.num_value_heads // self.whole.num_key_heads

    def _values(self, first: int, size: int) -> Parts:
        """The bounds of value heads of `size` rows, behind `first` rows of other kinds."""
        if not self.whole.tiled:
            return (_behind(first, _scaled(self.heads, self._ratio * size)),)
        rounds = range(0, self.whole.num_value_heads, self.whole.num_key_heads)
        return tuple(_behind(first + start * size, _scaled(self.heads, size)) for start in rounds)


def sizes(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how much each rank has."""
    return tuple(end - begin for begin, end in pairwise(bounds))


def _scaled(bounds: tuple[int, ...], unit: int) -> tuple[int, ...]:
    return tuple(unit * bound for bound in bounds)


def _behind(first: int, bounds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(first + bound for bound in bounds)
