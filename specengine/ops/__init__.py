"""The native ops, each beside its pure-PyTorch reference, and the one place that chooses between them.

`native` runs specengine._C on the CPU. `reference` runs the same calls in PyTorch on any device; the tests compare the
two, and CUDA runs it until an op has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specengine import _C
from specengine.ops import compact_kv, decoder, linear, verify_tree, weight


@dataclass(frozen=True)
class Ops:
    """What a target pass and a cycle are made of; a field has the signature of the function or class of its name."""

    formats: tuple[str, ...]  # of weights
    empty_weight: Callable[..., weight.Weight]
    pack_linear: Callable[..., None]
    pack_blocks: Callable[..., None] | None
    decoder: Callable[..., Callable[..., torch.Tensor]]
    linear: Callable[..., torch.Tensor]
    linear_argmax: Callable[..., torch.Tensor]
    verify_tree: Callable[..., verify_tree.Accepted]
    compact_kv: Callable[..., None]


native = Ops(
    formats=(*weight.FLOAT_FORMATS, *weight.BLOCK_BYTES),
    empty_weight=weight.empty_weight,
    pack_linear=weight.pack_linear,
    pack_blocks=weight.pack_blocks,
    decoder=decoder.Decoder,
    linear=linear.linear,
    linear_argmax=linear.linear_argmax,
    verify_tree=verify_tree.verify_tree,
    compact_kv=compact_kv.compact_kv,
)

reference = Ops(
    formats=tuple(weight.FLOAT_FORMATS),
    empty_weight=weight.empty_weight_reference,
    pack_linear=weight.pack_linear_reference,
    pack_blocks=None,
    decoder=decoder.ReferenceDecoder,
    linear=linear.linear_reference,
    linear_argmax=linear.linear_argmax_reference,
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
