"""A LLaMA decoder layer in plain PyTorch for training, with the names and the arithmetic of published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer. input_size: columns that q, k and v read; None for hidden_size (EAGLE-3 reads twice that)."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    input_size: int | None = None


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        columns = shape.input_size or shape.hidden_size
        width = shape.head_dim
        self.q_proj = nn.Linear(columns, shape.num_heads * width, bias=False)
        self.k_proj = nn.Linear(columns, shape.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(columns, shape.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * width, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x: [B, T, input].  positions: [B, T] or [T].  mask: bool [.., T, T], what a row may see; None: causal."""
        q, k, v = self.heads(x, positions)
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes queries [B, H, T, D], keys and values [B, K, T, D]; queries and keys are rotated to positions."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.at_positions(q, positions), self.at_positions(k, positions), v

    def at_positions(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Applies the rotary embedding in the two-halves layout."""
        half = self.shape.head_dim // 2
        rates = self.shape.rope_theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = positions[..., None].float() * rates
        if positions.ndim == 2:
            angles = angles[:, None]
        return rotated(x, angles.cos(), angles.sin())


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [.., T, D] by angles with the given cosines and sines [T, D / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class MLP(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A decoder layer. input_norm: false for a layer that reads its input without a norm (EAGLE-1 and -2)."""

    def __init__(self, shape: LayerShape, *, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))
