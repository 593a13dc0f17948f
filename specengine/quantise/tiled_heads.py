"""A hybrid whose value heads are in the order of GGUF files: key heads vary fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from specengine.models.checkpoint_base import Checkpoint
from specengine.utils.gated_delta_config import GatedDeltaConfig


class TiledHeads(Checkpoint):
    """A hybrid's checkpoint, of grouped value heads, with tiled ones.

    Value head j belongs to key head j // ratio in `grouped`, and to j % num_key_heads here.
    """

    def __init__(self, grouped: Checkpoint, delta: GatedDeltaConfig) -> None:
        self.source, self.metadata, self.tensors = grouped.source, grouped.metadata, grouped.tensors
        self.config = replace(grouped.config, gated_delta=replace(delta, tiled=True))
        self._grouped, self._delta = grouped, delta
        self._ratio = delta.num_value_heads // delta.num_key_heads

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        parts = [self._grouped.read_rows(name, *rows) for rows in self._ranges(name, start, stop)]
        rows = torch.cat(parts)
        if name.endswith(".linear_attn.out_proj.weight"):  # its columns are the values
            heads = rows.unflatten(1, (self._delta.num_key_heads, self._ratio, self._delta.value_head_dim))
            rows = heads.transpose(1, 2).flatten(1)
        out.copy_(rows)

    def _ranges(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Lists the grouped rows of rows [start, stop), as ranges in order."""
        first, size = self._values(name.rpartition(".linear_attn.")[2])
        if size == 0:
            yield start, stop
            return
        if start < first:
            yield start, min(stop, first)
        for head in range(self._delta.num_value_heads):
            own = first + head * size
            low, high = max(start, own), min(stop, own + size)
            if low < high:
                key_head, place = head % self._delta.num_key_heads, head // self._delta.num_key_heads
                offset = first + (key_head * self._ratio + place) * size - own
                yield low + offset, high + offset

    def _values(self, part: str) -> tuple[int, int]:
        """Returns the first row of the value heads in a tensor and the rows of each; 0 rows where it has none."""
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            return 2 * self._delta.key_size, self._delta.value_head_dim
        if part == "in_proj_z.weight":
            return 0, self._delta.value_head_dim
        return 0, int(part in ("in_proj_b.weight", "in_proj_a.weight", "decay", "dt_bias"))


def with_tiled_heads(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint as GGUF files order it: a hybrid's grouped heads are tiled, any other stays as it is."""
    delta = checkpoint.config.gated_delta
    return checkpoint if delta is None or delta.tiled else TiledHeads(checkpoint, delta)
