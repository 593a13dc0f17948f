"""Reads the weights of a checkpoint for a writer: float32 rows in steps, checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from specengine.models.checkpoint import Checkpoint, expected_tensors
from specengine.models.checkpoint_base import NOT_READ
from specengine.models.gated_delta.hf_config import HYBRIDS
from specengine.models.gated_delta.tensors import DRAFTER

_STEP_BYTES = 8 << 20
_STEP_ROWS = 128  # steps begin at a multiple of it: no block of FP8 is cut

# Granite's multipliers and gpt-oss's experts with biases are not written yet
_WRITTEN = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", *HYBRIDS)
_GATES = (
    *("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
    *("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight", "linear_attn.in_proj_ba.weight"),
)
_LINEARS = ("_proj.weight", *(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "qkvz")))

# of tensors done, of all tensors, name of the next one
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Source:
    """A checkpoint to be written in another format. folder: of a Hugging Face checkpoint, None for other sources.

    published: the checkpoint has the names of its family's files, see `open_published`.
    """

    checkpoint: Checkpoint
    folder: Path | None
    progress: Progress = lambda done, total, name: None
    published: bool = False

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Lists the tensors to write; a copy of tied embeddings is not one.

        Raises ValueError for an architecture that no writer knows.
        """
        config = self.checkpoint.config
        if config.architecture not in _WRITTEN:
            where, known = self.checkpoint.source, ", ".join(_WRITTEN)
            raise ValueError(f"{where}: models of {config.architecture} cannot be written yet, expected {known}")
        if not self.published:
            return expected_tensors(config)
        spare = {"lm_head.weight"} if config.tie_embeddings else set()
        named = self.checkpoint.tensors.items()
        return {name: info.shape for name, info in named if name not in spare and not NOT_READ.fullmatch(name)}

    def progressing(self, names: Collection[str]) -> Iterator[str]:
        """Yields names of tensors and reports progress."""
        for done, name in enumerate(names):
            self.progress(done, len(names), name)
            yield name
        self.progress(len(names), len(names), "")

    def steps(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the first row and the values, float32, of steps of a tensor.

        Raises ValueError for a value that is not finite.
        """
        shape = self.shapes[name]
        row_bytes = 4 * prod(shape[1:])
        step = max(1, _STEP_BYTES // (row_bytes * _STEP_ROWS)) * _STEP_ROWS
        for start in range(0, shape[0], step):
            rows = self.checkpoint.read_rows(name, start, min(start + step, shape[0])).float()
            if not rows.isfinite().all():
                raise ValueError(f"{self.checkpoint.source}: tensor '{name}' has a value that is not finite")
            yield start, rows


def is_linear(name: str) -> bool:
    """Returns whether a tensor is the matrix of a layer: neither embedding nor head, no gate, and none of a drafter."""
    return name.endswith(_LINEARS) and not name.startswith(DRAFTER)


def is_gate(name: str) -> bool:
    """Returns whether a tensor is a router, the gate of a shared expert, or makes the decays and rates of a state.

    They stay floats: an error would send a token to other experts, or change how long a state remembers.
    """
    return name.endswith(_GATES)
