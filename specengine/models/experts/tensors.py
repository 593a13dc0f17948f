"""The tensors of experts under one set of names, those of Qwen's files, however a family's files store them.

    mlp.gate.weight [E, hidden], mlp.experts.N.{gate,up,down}_proj.weight, mlp.shared_expert.*, mlp.shared_expert_gate

Other files name them differently, or hold all experts of a layer in one tensor of three dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from specengine.models.checkpoint_base import Checkpoint, TensorInfo
from specengine.models.experts.gpt_oss import GptOssTensors
from specengine.ops.coded.rows import CodedRows

# Mixtral's and Granite's names; w1 is the gate, w3 goes up, w2 down; input_linear is gate and up
_RENAMED = (
    (re.compile(r"\.block_sparse_moe\.gate\."), ".mlp.gate."),
    (re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w1\."), r".mlp.experts.\1.gate_proj."),
    (re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w3\."), r".mlp.experts.\1.up_proj."),
    (re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w2\."), r".mlp.experts.\1.down_proj."),
    (re.compile(r"\.block_sparse_moe\.router\.layer\."), ".mlp.gate."),
    (re.compile(r"\.block_sparse_moe\.input_linear\.weight"), ".mlp.experts.gate_up_proj"),
    (re.compile(r"\.block_sparse_moe\.output_linear\.weight"), ".mlp.experts.down_proj"),
    (re.compile(r"\.shared_mlp\.input_linear\."), ".mlp.shared_expert.gate_up_proj."),
    (re.compile(r"\.shared_mlp\.output_linear\."), ".mlp.shared_expert.down_proj."),
)
# the way back, of Mixtral alone: Granite's files have one tensor for all experts
_MIXTRAL_NAMES = (
    (re.compile(r"\.mlp\.gate\."), ".block_sparse_moe.gate."),
    (re.compile(r"\.mlp\.experts\.(\d+)\.gate_proj\."), r".block_sparse_moe.experts.\1.w1."),
    (re.compile(r"\.mlp\.experts\.(\d+)\.up_proj\."), r".block_sparse_moe.experts.\1.w3."),
    (re.compile(r"\.mlp\.experts\.(\d+)\.down_proj\."), r".block_sparse_moe.experts.\1.w2."),
)
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_SHARED = re.compile(r"(.*\.mlp\.shared_expert)\.gate_up_proj\.weight")


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies. expert: of a tensor of three dimensions, else None.  first: its first row there."""

    name: str
    expert: int | None = None
    first: int = 0


class ExpertTensors(Checkpoint):
    """A checkpoint of a mixture of experts, one matrix for each part of each expert.

    It keeps the matrix that was read last from a tensor of all experts: every read takes a whole one.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self.source, self.config, self.metadata = stored.source, stored.config, stored.metadata
        self._stored = stored
        self._places: dict[str, _Place] = {}
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None
        self.tensors = {}
        for name, info in stored.tensors.items():
            for own, place, shape in self._parts(name, info):
                if own in self._places:
                    raise ValueError(f"{self.source}: tensor '{name}' and another one both have '{own}'")
                self._places[own], self.tensors[own] = place, replace(info, shape=shape)

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See Checkpoint."""
        place = self._places[name]
        return self._stored.read_blocks(place.name, place.first + start, place.first + stop)

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        """See Checkpoint."""
        self._info(name)
        place = self._places[name]
        return self._stored.read_coded(place.name, place.first + start, place.first + stop)

    def column_order(self, name: str) -> torch.Tensor | None:
        """See Checkpoint."""
        return self._stored.column_order(self._places[name].name) if name in self._places else None

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        place = self._places[name]
        if place.expert is None:
            out.copy_(self._stored.read_rows(place.name, place.first + start, place.first + stop))
        else:
            key = place.name, place.expert
            if self._last is None or self._last[0] != key:
                self._last = key, self._stored.read_rows(place.name, place.expert, place.expert + 1)[0]
            out.copy_(self._last[1][place.first + start : place.first + stop])

    def _parts(self, name: str, info: TensorInfo) -> Iterator[tuple[str, _Place, tuple[int, ...]]]:
        """Lists the tensors that one stored tensor holds: names, places and shapes."""
        own, moe = _renamed(name), self.config.moe
        assert moe is not None
        if shared := _SHARED.fullmatch(own):
            self._check(name, info, (2 * moe.shared_size, self.config.hidden_size))
            for part, first in (("gate_proj", 0), ("up_proj", moe.shared_size)):
                yield f"{shared[1]}.{part}.weight", _Place(name, first=first), (moe.shared_size, *info.shape[1:])
            return
        fused = _FUSED.fullmatch(own)
        if fused is None:
            yield own, _Place(name), info.shape
            return
        rows, columns = moe.intermediate_size, self.config.hidden_size
        parts = {"gate_proj": (0, rows), "up_proj": (rows, rows)}
        if fused[2] == "down_proj":
            rows, columns, parts = columns, rows, {"down_proj": (0, columns)}
        self._check(name, info, (moe.num_experts, sum(size for _, size in parts.values()), columns))
        for expert in range(moe.num_experts):
            for part, (first, size) in parts.items():
                yield f"{fused[1]}.{expert}.{part}.weight", _Place(name, expert, first), (size, columns)

    def _check(self, name: str, info: TensorInfo, expected: tuple[int, ...]) -> None:
        if info.shape != expected:
            raise ValueError(f"{self.source}: tensor '{name}' has shape {info.shape}, expected {expected}")


def named_experts(stored: Checkpoint) -> Checkpoint:
    """Returns a checkpoint whose experts have the names of this module; a dense model's is returned as it is."""
    config = stored.config
    if config.moe is None:
        return stored
    return GptOssTensors(stored) if config.architecture == "gpt_oss" else ExpertTensors(stored)


def published_name(name: str, architecture: str) -> str:
    """Returns the name that a family's own files have for a tensor of a matrix for each expert."""
    if architecture != "mixtral":
        return name
    for pattern, own in _MIXTRAL_NAMES:
        name = pattern.sub(own, name)
    return name


def _renamed(name: str) -> str:
    for pattern, own in _RENAMED:
        name = pattern.sub(own, name)
    return name
