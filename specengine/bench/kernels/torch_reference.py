"""Computations of the kernels in PyTorch. The host reads nothing, so that a CUDA graph can capture them."""

from __future__ import annotations

import torch

from specengine.types import SamplingParams

_OVER = -2  # the parent of no node; the root's parent is -1


def verify(
    logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, params: SamplingParams, depth: int
) -> torch.Tensor:
    """Draws a token at every node and walks down. Returns the accepted path, int32 [depth], filled up with -1.

    logits: float32 [N, V].  tokens, parents: int32 [N]. Honours temperature and top_p.
    """
    drawn = _draw(logits, params)
    node = torch.zeros(1, dtype=torch.int64, device=logits.device)
    path = [node]
    for _ in range(depth - 1):
        follows = (parents == node) & (tokens == drawn[node.clamp(min=0)])
        node = follows.int().argmax()[None].masked_fill(~follows.any(), _OVER)
        path.append(node)
    return torch.cat(path).clamp(min=-1).int()


def _draw(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if params.temperature == 0:
        return logits.argmax(dim=-1)
    probs, order = (logits / params.temperature).softmax(dim=-1).sort(dim=-1, descending=True)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= params.top_p, 0)
    choice = (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1, keepdim=True)
    return order.gather(1, choice)[:, 0]


def rope_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Returns rotated queries [M, H, D], and writes rotated keys and values to their slots.

    qkv: [M, H + 2K, D].  cos, sin: [T, D/2].  keys, values: [slots, K, D].  positions, slots: int64 [M].
    """
    kv_heads = keys.shape[1]
    rotated = qkv[:, :-kv_heads]
    a, b = rotated.chunk(2, dim=-1)
    c, s = cos[positions, None], sin[positions, None]
    rotated = torch.cat([a * c - b * s, b * c + a * s], dim=-1)
    keys.index_copy_(0, slots, rotated[:, -kv_heads:].to(keys.dtype))
    values.index_copy_(0, slots, qkv[:, -kv_heads:].to(values.dtype))
    return rotated[:, :-kv_heads]
