"""The gated delta rule (Yang et al. 2024) as Qwen3.5 has it, and its states after acceptance.

Shapes: M rows of B requests, Hk key heads and Hv value heads of Dk and Dv components, C = 2 Hk Dk + Hv Dv channels.
DeltaStates: states float32 [slots, layers, Hv, Dk, Dv]; conv float32 [slots, layers, 3, C], the last inputs of the
convolution; slots int32 [B]; records float32 [layers, M, 2 C + 2 Hv], written by a pass; final: rows are parts of their
texts, the pass writes the states itself and records are [1, M, 2 C + 2 Hv].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specengine import _C
from specengine._C import DeltaStates
from specengine.ops.gated_delta.matrices import GatedDelta

NORM_EPS = 1e-6  # of q and k, fixed by the architecture
MAX_CUDA_DIM = 128  # components of a head; kMaxDeltaDim of csrc/ops/gated_delta/gated_delta.h


def gated_delta(rows, layer: GatedDelta, states: DeltaStates, number: int, row_start, ancestors, out, eps) -> None:
    """Runs one layer: out[M, Hv Dv] = norm(S^T q) * silu(z) of rows [M, C + Hv Dv + 2 Hv] = [q | k | v | z | b | a].

    number: of the layer among those with states.  row_start: int32 [B + 1].  ancestors: int32 [M, W] bits; None:
    chains. Each node's state S follows from its parent's, the root's from the committed one.
    out: float32, on CUDA also bfloat16 or float16.
    Raises ValueError for tensors that do not fit, for two requests with one slot, and for trees where states are final.
    CUDA does not look at slots: there a row of trees without any ancestor bit, or behind the last request's rows, is
    padding and becomes zeros. Every row of chains belongs to a request. CUDA has heads of at most 128 x 128.
    """
    _C.gated_delta(rows, layer.native, states, number, row_start, ancestors, out, eps)


def compact_states(states: DeltaStates, row_start, path, path_length, key_heads: int, tiled: bool) -> None:
    """Writes the states behind the accepted paths, all layers in one call, from the records of the pass.

    path: int32 [B, N], ascending node indices.  path_length: int32 [B].  key_heads, tiled: see GatedDelta.
    """
    _C.compact_states(states, row_start, path, path_length, key_heads, tiled)


def gated_delta_reference(rows, layer: GatedDelta, states, number, row_start, ancestors, out, eps) -> None:
    for b, slot in enumerate(states.slots.tolist()):
        first, last = row_start[b].item(), row_start[b + 1].item()
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        for m in range(first, last):
            parent = _parent(m - first, ancestors[m] if ancestors is not None else None)
            committed = states.states[slot, number], states.conv[slot, number]
            state, inputs = made[parent] if parent >= 0 else committed
            made.append(_token(rows[m], layer, state, inputs, out[m], eps, _record(states, number, m)))
        if states.final and made:
            states.states[slot, number], states.conv[slot, number] = made[-1]


def compact_states_reference(states, row_start, path, path_length, key_heads: int, tiled: bool) -> None:
    layers, heads, dim = states.states.shape[1:4]
    channels = states.conv.shape[3]
    keys = key_heads * dim
    for b, slot in enumerate(states.slots.tolist()):
        for node in path[b, : path_length[b]].tolist():
            for number in range(layers):
                record = states.records[number, row_start[b] + node]
                _, k, v = record[channels : 2 * channels].split([keys, keys, channels - 2 * keys])
                decay, rate = record[2 * channels :].chunk(2)
                state, k = states.states[slot, number], _of_heads(k.view(key_heads, dim), heads, tiled)
                state.copy_(_step(state, k, v.view(heads, -1), decay, rate))
                states.conv[slot, number] = torch.cat([states.conv[slot, number, 1:], record[None, :channels]])


def _parent(node: int, bits) -> int:
    if bits is None:
        return node - 1
    words = [word & 0xFFFFFFFF for word in bits.tolist()]
    return max((n for n in range(node) if words[n // 32] >> (n % 32) & 1), default=-1)


def _record(states, number: int, row: int) -> torch.Tensor:
    return states.records[0 if states.final else number, row]


def _token(row, layer: GatedDelta, state, inputs, out, eps, record) -> tuple[torch.Tensor, torch.Tensor]:
    """The state behind one token and the last inputs of the convolution; writes the token's output and its record."""
    channels, heads = layer.conv.shape[1], layer.value_heads
    values = heads * len(layer.norm)
    x, z, b, a = row.split([channels, values, heads, heads])
    window = torch.cat([inputs, x[None]])
    mixed = F.silu((window * layer.conv).sum(dim=0))
    keys = (channels - values) // 2
    q, k, v = mixed.split([keys, keys, values])
    q, k = (_of_length_1(part.view(layer.key_heads, -1)) for part in (q, k))
    q = q / q.shape[1] ** 0.5
    decay, rate = (layer.decay * F.softplus(a + layer.dt_bias)).exp(), b.sigmoid()
    record.copy_(torch.cat([x, q.flatten(), k.flatten(), v, decay, rate]))
    state = _step(state, _of_heads(k, heads, layer.tiled), v.view(heads, -1), decay, rate)
    o = torch.einsum("hkv,hk->hv", state, _of_heads(q, heads, layer.tiled))
    normed = o * torch.rsqrt(o.square().mean(dim=-1, keepdim=True) + eps) * layer.norm
    out.copy_(normed.flatten() * F.silu(z))
    return state, window[1:]


def _step(state, k, v, decay, rate) -> torch.Tensor:
    faded = state * decay[:, None, None]
    delta = (v - torch.einsum("hkv,hk->hv", faded, k)) * rate[:, None]
    return faded + k[:, :, None] * delta[:, None]


def _of_heads(part, heads: int, tiled: bool) -> torch.Tensor:
    """The key head of every value head, [Hv, Dk] of [Hk, Dk]."""
    times = heads // len(part)
    return part.repeat(times, 1) if tiled else part.repeat_interleave(times, dim=0)


def _of_length_1(heads) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + NORM_EPS)
