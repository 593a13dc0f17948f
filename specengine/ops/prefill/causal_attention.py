"""Causal attention of one request's new rows over its gathered cache, in PyTorch: prefill on CUDA.

flash-attn (the optional extra `flash`) serves long runs if it is installed and the cache has a half type. Everything
else goes through torch's scaled_dot_product_attention, whose own flash kernel takes half types without a window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

FLASH_ROWS = 64  # fewer rows gain nothing from flash-attn


def causal_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends: float32 [n, H, D]; row i sees keys up to index S - n + i, at most window - 1 back if window > 0.

    q: float32 [n, H, D].  keys, values: [S, K, D]; the last n are the rows' own.  sinks: see masked_attention.
    """
    if sinks is None and _flash_serves(q, keys):
        reach = (window - 1 if window > 0 else -1, 0)
        batch = (x.to(keys.dtype)[None] for x in (q, keys, values))
        return flash_attn_func(*batch, softmax_scale=scale, causal=True, window_size=reach)[0].float()
    rows, slots = q.shape[0], keys.shape[0]
    if sinks is None and _is_half(keys) and window == 0:
        from torch.nn.attention.bias import (
            causal_lower_right,
        )  # imported late: it loads torch's compiler, which takes two seconds

        keys, values = (x.transpose(0, 1)[None] for x in (keys, values))
        rounded = q.to(keys.dtype).transpose(0, 1)[None]
        mask = causal_lower_right(rows, slots)
        shared = q.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(rounded, keys, values, attn_mask=mask, scale=scale, enable_gqa=shared)
        return out[0].transpose(0, 1).float()
    position = torch.arange(slots - rows, slots, device=q.device)[:, None]
    key = torch.arange(slots, device=q.device)[None, :]
    visible = key <= position
    if window > 0:
        visible &= position - key < window
    return masked_attention(q, keys, values, visible, scale, sinks)


def masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [n, H, D] for bool `visible` [n, S]; arithmetic in float32.

    sinks: float32 [H], a score of each head that takes part in the softmax and has no value; None: none.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
    if sinks is None:
        out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=visible, scale=scale)
        return out.transpose(0, 1)
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
    with_sinks = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=2)
    return (with_sinks.softmax(dim=2)[..., :-1] @ values).transpose(0, 1)


def _flash_serves(q: torch.Tensor, keys: torch.Tensor) -> bool:
    return flash_attn_func is not None and keys.is_cuda and _is_half(keys) and q.shape[0] >= FLASH_ROWS


def _is_half(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)
