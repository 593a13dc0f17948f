"""Straight-line readings of a target in plain PyTorch: whole requests, no cache, none of our ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Dense:
    """Of one request. last: [T, hidden], normed.  keys (rotated), values: per layer [T, K, D]."""

    last: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def normed(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x, positions, theta):
    """x: [T, heads, D], component j paired with j + D / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * theta ** (-torch.arange(half).float() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attended(q, keys, values, visible):
    """q: [T, H, D].  keys, values: [S, K, D].  visible: bool [T, S]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, keys) / q.shape[-1] ** 0.5
    return torch.einsum("hts,shd->thd", scores.masked_fill(~visible, -torch.inf).softmax(-1), values).flatten(1)


def mlp(x, state, prefix):
    gate, up, down = (state[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def projected(x, state, prefix, dim):
    """Queries, keys and values [T, heads, D] of rows x."""
    return [(x @ state[f"{prefix}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim)) for name in "qkv"]


def dense_target(state, config, tokens) -> Dense:
    """A LLaMA without biases."""
    positions = torch.arange(len(tokens))
    causal = positions[:, None] >= positions[None]
    x, result = state["model.embed_tokens.weight"][list(tokens)], Dense(None, [], [])
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        normal = normed(x, state[f"{prefix}.input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = projected(normal, state, prefix, config.head_dim)
        q, k = (rotated(each, positions, config.rope.theta) for each in (q, k))
        result.keys.append(k), result.values.append(v)
        x = x + attended(q, k, v, causal) @ state[f"{prefix}.self_attn.o_proj.weight"].T
        normal = normed(x, state[f"{prefix}.post_attention_layernorm.weight"], config.rms_norm_eps)
        x = x + mlp(normal, state, prefix)
    result.last = normed(x, state["model.norm.weight"], config.rms_norm_eps)
    return result


def largest_error(ours, expected) -> float:
    """Relative to the largest entry."""
    return ((ours - expected).abs().max() / expected.abs().max()).item()
