"""The row-wise ops of a decoder layer: RMSNorm with residual, the gates of MLPs, RoPE with cache write.

Shapes: M rows, C columns, I intermediate size, H query heads, K key/value heads, D head dim, T positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specengine import _C
from specengine._C import PAGE_SIZE, KVCacheView

Kept = tuple[torch.Tensor, int]  # float32 [M, L, C], and which of its L layers becomes the residual


def rms_norm(residual, delta, weight, out, eps: float, kept: Kept | None = None) -> None:
    """residual[M, C] += delta (where given); out[M, C] = residual / sqrt(mean(residual^2) + eps) * weight[C].

    weight: or [P * C], weights of every P rows in turn.  out: rows for the next linear layer: float32 or quantised on
    the CPU, the layer's weight dtype on CUDA.  kept: layers float32 [M, L, C], and which of them becomes the residual.
    """
    layers, place = kept or (None, 0)
    _C.rms_norm(residual, delta, weight, out, eps, layers, place)


def silu_mul(gate_up, out) -> None:
    """out[M, I] = silu(gate) * up for gate_up [M, 2I] = [gate | up], float32; out: as for rms_norm."""
    _C.silu_mul(gate_up, out)


def clamped_swiglu(gate_up, out, limit: float, alpha: float) -> None:
    """out[M, I] = (up + 1) * gate * sigmoid(alpha * gate), for gate at most `limit` and up from -limit to limit.

    gate_up, out: as for silu_mul.
    """
    _C.clamped_swiglu(gate_up, out, limit, alpha)


def rope_cache(qkv, cos, sin, q_norm, k_norm, depths, cache: KVCacheView, q, eps: float, first: int = 0) -> None:
    """Rotates q and k of qkv [M, (H + 2K) D] to position length + depth, writes k and v to slot length + node index.

    qkv may be [M, (2H + 2K) D]: each head of q is followed by its gate, which gate_heads reads.
    cos, sin: [T, R/2]; the first R components of a head are rotated.  q_norm, k_norm: RMSNorm
    weights before the rotation, [D], a norm for each head (Qwen3), or [H D] and [K D], one norm for all heads (OLMoE);
    None: no norm.  depths: int32 [M].  cache: one layer; K = 0: queries alone are rotated.
    q: [M, H, D], written.  first: the column where k begins; H = 0: columns that other calls read may lie around it.
    Raises ValueError if a slot has no page or a position no row in cos. CUDA does not: there a row of depth -1, or
    behind the last request's rows, is padding; its q becomes 0 and the cache stays as it is.
    """
    _C.rope_cache(qkv, cos, sin, q_norm, k_norm, depths, cache, q, eps, first)


def gate_heads(qkv, heads) -> None:
    """heads[M, H, D] *= sigmoid(gate); qkv [M, (2H + 2K) D] has a gate behind each head of q.

    heads: float32, on CUDA also bfloat16 or float16.
    """
    _C.gate_heads(qkv, heads)


def rms_norm_reference(residual, delta, weight, out, eps: float, kept: Kept | None = None) -> None:
    if delta is not None:
        residual.add_(delta)
    if kept is not None:
        kept[0][:, kept[1]] = residual
    weight = weight.view(-1, residual.shape[1])
    weight = weight.repeat(-(-len(residual) // len(weight)), 1)[: len(residual)]
    out.copy_(_normalise(residual, weight, eps))


def silu_mul_reference(gate_up, out) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def clamped_swiglu_reference(gate_up, out, limit: float, alpha: float) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_((up + 1) * gate * (alpha * gate).sigmoid())


def rope_cache_reference(qkv, cos, sin, q_norm, k_norm, depths, cache: KVCacheView, q, eps: float, first=0) -> None:
    k_cache, v_cache, block_table, lengths, row_start, first_node = cache
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    request, node = rows_of(row_start, rows)
    real = (depths >= 0) & (request < len(lengths))
    request, node, depths = request[real], node[real], depths[real]
    position = (lengths[request] + depths).long()
    slot = (lengths[request] + first_node + node).long()
    if heads == 0:
        qkv = qkv[:, first : first + 2 * kv_heads * dim]
    qkv = qkv.reshape(rows, -1, dim)[real]
    query, key, value = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    query = query[:, :: max(1, query.shape[1] // max(1, heads))]
    q.zero_()
    q[real] = _rotate(query, q_norm, cos[position], sin[position], eps)
    page = block_table[request, slot // PAGE_SIZE].long()
    k_cache[page, :, slot % PAGE_SIZE] = _rotate(key, k_norm, cos[position], sin[position], eps).to(k_cache.dtype)
    v_cache[page, :, slot % PAGE_SIZE] = value.to(v_cache.dtype)


def gate_heads_reference(qkv, heads) -> None:
    rows, count, dim = heads.shape
    heads.mul_(qkv.view(rows, -1, dim)[:, 1 : 2 * count : 2].sigmoid())


def rows_of(row_start: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the node index of each row: int64 [M] each."""
    row = torch.arange(rows, device=row_start.device)
    request = torch.searchsorted(row_start[1:].long(), row, right=True)
    return request, row - row_start[request]


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _rotate(x: torch.Tensor, norm, cos: torch.Tensor, sin: torch.Tensor, eps: float) -> torch.Tensor:
    if norm is not None:
        x = _normalise(x.flatten(1), norm, eps).view(x.shape) if len(norm) > x.shape[2] else _normalise(x, norm, eps)
    return rotate(x, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates heads x [M, H, D] to the positions of cos and sin [M, R/2]; component j < R/2 is paired with j + R/2."""
    half = cos.shape[1]
    a, b, rest = x.split([half, half, x.shape[2] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
