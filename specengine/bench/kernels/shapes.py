"""Sizes and data types that kernels are measured at."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_SETS = 64


@dataclass(frozen=True)
class Shapes:
    """Holds the shapes of a model, and the sizes that kernels are measured at.

    prefixes: cached tokens.  trees: nodes.  rows: of a linear layer.  levels, k: of a drafted tree.
    accepted: nodes of a path.  cold_bytes: total size of the buffers that calls use in turn.
    """

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
        """Returns how many sets of buffers of `nbytes` calls use in turn, so that no cache holds them all."""
        return max(1, min(MOST_SETS, -(-self.cold_bytes // nbytes)))

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Output and input columns of each linear layer."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


@dataclass(frozen=True)
class Kernels:
    """Holds the data types of a device's default kernels.

    cache: of keys and values.  rows: of a kernel's output.  torch: the fastest type of PyTorch on the device.
    packed: whether weights are packed in panels.
    """

    cache: torch.dtype
    rows: torch.dtype
    torch: torch.dtype
    packed: bool


CUDA = Kernels(torch.bfloat16, torch.bfloat16, torch.bfloat16, packed=False)
CPU = Kernels(torch.float16, torch.float32, torch.float32, packed=True)
LLAMA_8B = Shapes()
QWEN3_30B_A3B = Shapes(kv_heads=4, hidden=2048, intermediate=768, vocab=151936, layers=48)  # intermediate: of an expert
# The default model, with prefixes and trees of a CPU. Its weights fit no cache.
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
