"""What a kernel is measured at: the shapes of a model, and one computation beside the same in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specengine.bench.kernels.timers import Call

MOST_SETS = 64


@dataclass(frozen=True)
class Shapes:
    """Of a model and of what is asked of it. cold_bytes: that buffers in turn have together."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 14336
    vocab: int = 128256
    layers: int = 32
    prefixes: tuple[int, ...] = (1024, 4096, 32768)
    trees: tuple[int, ...] = (1, 8, 16, 60)
    rows: tuple[int, ...] = (1, 8, 16, 32, 64)
    levels: int = 7
    k: int = 10
    accepted: int = 8
    cold_bytes: int = 192 << 20

    def sets(self, nbytes: int) -> int:
        """How many sets of buffers of so many bytes to take in turn."""
        return max(1, min(MOST_SETS, -(-self.cold_bytes // nbytes)))

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Output and input columns of every linear layer."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


@dataclass(frozen=True)
class Case:
    """One kernel at one size. nbytes: read and written at least.  ours: calls by variant of the kernel.  torch: the
    calls of PyTorch. A call gives what it computed, or None where there is nothing to compare."""

    kernel: str
    size: str
    nbytes: int
    ours: dict[str, list[Call]]
    torch: list[Call]


@dataclass(frozen=True)
class Kernels:
    """Which ones, by the types of the engine's default where they run. cache: of keys and values.  rows: of what a
    kernel hands on.  torch: what PyTorch is fastest in.  packed: weights are packed in panels."""

    cache: torch.dtype
    rows: torch.dtype
    torch: torch.dtype
    packed: bool


CUDA = Kernels(torch.bfloat16, torch.bfloat16, torch.bfloat16, packed=False)
CPU = Kernels(torch.float16, torch.float32, torch.float32, packed=True)


LLAMA_8B = Shapes()
# The default model, whose weights fit no cache here, and prefixes and trees of a CPU.
SMOLLM2 = Shapes(
    heads=9,
    kv_heads=3,
    head_dim=64,
    hidden=576,
    intermediate=1536,
    vocab=49152,
    layers=30,
    prefixes=(256, 1024, 4096),
    trees=(1, 4, 16),
    rows=(1, 4, 16),
    levels=4,
    k=4,
    accepted=3,
)


def writing(out: torch.Tensor | None, function: Callable[..., object], *arguments: object) -> Call:
    """A call that gives a tensor which the function writes."""

    def run() -> torch.Tensor | None:
        function(*arguments)
        return out

    return run


def each(function: Callable[[Any], object], items: Iterable[Any]) -> list[Call]:
    """A call of the function per item."""
    return [partial(function, item) for item in items]
