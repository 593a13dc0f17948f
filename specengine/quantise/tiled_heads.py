"""A hybrid whose value heads are in the order of GGUF files."""

from __future__ import annotations

from dataclasses import replace

import torch

from specengine.models.checkpoint_base import Checkpoint
from specengine.models.gated_delta.head_order import tiled_order
from specengine.utils.gated_delta_config import GatedDeltaConfig


class TiledHeads(Checkpoint):
    """A hybrid's checkpoint, of grouped value heads, with tiled ones."""

    def __init__(self, grouped: Checkpoint, delta: GatedDeltaConfig) -> None:
        self.source, self.metadata, self.tensors = grouped.source, grouped.metadata, grouped.tensors
        self.config = replace(grouped.config, gated_delta=replace(delta, tiled=True))
        self._grouped, self._delta = grouped, delta

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        part = name.rpartition(".linear_attn.")[2].removesuffix(".weight")
        order = tiled_order(part, self._delta)
        if order is None or part == "out_proj":
            rows = self._grouped.read_rows(name, start, stop)
            out.copy_(rows if order is None else rows[:, order])
            return
        wanted = order[start:stop]
        ends = [*(wanted.diff() != 1).nonzero().flatten().add(1).tolist(), len(wanted)]  # of runs of rows
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            row = int(wanted[first])
            out[first:end] = self._grouped.read_rows(name, row, row + end - first)


def with_tiled_heads(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint as GGUF files order it: a hybrid's grouped heads are tiled, any other stays as it is."""
    delta = checkpoint.config.gated_delta
    return checkpoint if delta is None or delta.tiled else TiledHeads(checkpoint, delta)
