"""Folders of random drafters, and their arithmetic in plain PyTorch: dense, without cache and without our ops."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from specengine.models.config import ModelConfig

POSITIONS = 2048


class RandomWeights:
    """Seeded tensors by name, of a spread that keeps activations near 1."""

    def __init__(self, seed: int = 0) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=self._generator) / columns**0.5
        if bias:
            self.tensors[f"{name}.bias"] = 0.1 * torch.randn(rows, generator=self._generator)

    def norms(self, *names: str, size: int) -> None:
        for name in names:
            self.tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=self._generator)

    def layer(self, prefix: str, c: ModelConfig, *, inputs: int | None = None, input_norm: bool = True) -> None:
        """A decoder layer; inputs: columns that q, k and v read."""
        size, columns = c.hidden_size, inputs or c.hidden_size
        if input_norm:
            self.norms(f"{prefix}.input_layernorm", size=size)
        self.norms(f"{prefix}.post_attention_layernorm", size=size)
        self.linear(f"{prefix}.self_attn.q_proj", c.num_heads * c.head_dim, columns)
        for name in ("k_proj", "v_proj"):
            self.linear(f"{prefix}.self_attn.{name}", c.num_kv_heads * c.head_dim, columns)
        self.linear(f"{prefix}.self_attn.o_proj", size, c.num_heads * c.head_dim)
        for name in ("gate_proj", "up_proj"):
            self.linear(f"{prefix}.mlp.{name}", c.intermediate_size, size)
        self.linear(f"{prefix}.mlp.down_proj", size, c.intermediate_size)

    def vocabulary(self, target: int, draft: int) -> None:
        """A draft vocabulary of so many of the target's tokens."""
        tokens = torch.randperm(target, generator=self._generator)[:draft].sort().values
        self.tensors["d2t"] = tokens - torch.arange(draft)

    def save(self, folder: Path, c: ModelConfig, **fields) -> Path:
        """config.json has the sizes of `c`."""
        sizes = {
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "num_hidden_layers": c.num_layers,
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope.theta,
            "max_position_embeddings": POSITIONS,
            "vocab_size": c.vocab_size,
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**sizes, **fields}))
        return folder


def norm(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def dense_layer(
    tensors: dict[str, torch.Tensor], prefix: str, c: ModelConfig, x: torch.Tensor, attended: torch.Tensor | None = None
) -> torch.Tensor:
    """One layer over x [T, hidden] of positions 0..T-1.  attended: what q, k and v read; by default the normed x."""
    if attended is None:
        attended = norm(x, tensors[f"{prefix}.input_layernorm.weight"], c.rms_norm_eps)
    x = x + dense_attention(tensors, f"{prefix}.self_attn", c, attended)
    y = norm(x, tensors[f"{prefix}.post_attention_layernorm.weight"], c.rms_norm_eps)
    gate, up = (y @ tensors[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ tensors[f"{prefix}.mlp.down_proj.weight"].T


def dense_attention(tensors: dict[str, torch.Tensor], prefix: str, c: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    """Causal attention, head by head."""
    q, k, v = (x @ tensors[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    positions, group = torch.arange(len(x)), c.num_heads // c.num_kv_heads
    hidden = torch.triu(torch.ones(len(x), len(x), dtype=torch.bool), 1)
    heads = []
    for h in range(c.num_heads):
        query, key, value = (_head(y, i, c.head_dim) for y, i in ((q, h), (k, h // group), (v, h // group)))
        query, key = rotated(query, positions, c.rope.theta), rotated(key, positions, c.rope.theta)
        scores = (query @ key.T / c.head_dim**0.5).masked_fill(hidden, -torch.inf)
        heads.append(scores.softmax(-1) @ value)
    return torch.cat(heads, -1) @ tensors[f"{prefix}.o_proj.weight"].T


def rotated(x: torch.Tensor, positions: Iterable[int] | torch.Tensor, theta: float) -> torch.Tensor:
    """x [T, D], component j turned with component j + D / 2."""
    half = x.shape[-1] // 2
    angles = torch.as_tensor(positions)[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _head(x: torch.Tensor, head: int, dim: int) -> torch.Tensor:
    return x[:, head * dim : (head + 1) * dim]
