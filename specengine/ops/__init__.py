"""The native ops, each beside its pure-PyTorch reference, and the one place that chooses between them.

`native` runs specengine._C on the CPU. `reference` runs the same calls in PyTorch on any device; the tests compare the
two, and CUDA runs it until an op has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specengine import _C
from specengine.ops import compact_kv, layer, linear, tree_attention, verify_tree


@dataclass(frozen=True)
class Ops:
    """The ops a target pass and a cycle are made of; every field has the signature of the function of its name."""

    empty_weight: Callable[..., torch.Tensor]
    pack_linear: Callable[..., None]
    gather_rows: Callable[..., None]
    linear: Callable[..., None]
    rms_norm: Callable[..., None]
    silu_mul: Callable[..., None]
    rope_cache: Callable[..., None]
    tree_attention: Callable[..., None]
    verify_tree: Callable[..., verify_tree.Accepted]
    compact_kv: Callable[..., None]


native = Ops(
    empty_weight=linear.empty_weight,
    pack_linear=linear.pack_linear,
    gather_rows=linear.gather_rows,
    linear=linear.linear,
    rms_norm=layer.rms_norm,
    silu_mul=layer.silu_mul,
    rope_cache=layer.rope_cache,
    tree_attention=tree_attention.tree_attention,
    verify_tree=verify_tree.verify_tree,
    compact_kv=compact_kv.compact_kv,
)

reference = Ops(
    empty_weight=linear.empty_weight_reference,
    pack_linear=linear.pack_linear_reference,
    gather_rows=linear.gather_rows_reference,
    linear=linear.linear_reference,
    rms_norm=layer.rms_norm_reference,
    silu_mul=layer.silu_mul_reference,
    rope_cache=layer.rope_cache_reference,
    tree_attention=tree_attention.tree_attention_reference,
    verify_tree=verify_tree.verify_tree_on_host,
    compact_kv=compact_kv.compact_kv_reference,
)


def ops_for(device: torch.device) -> Ops:
    """The ops that serve tensors on `device`."""
    if device.type == "cpu":
        return native
    if _C.cuda_architectures:
        return replace(reference, compact_kv=compact_kv.compact_kv)
    return reference
