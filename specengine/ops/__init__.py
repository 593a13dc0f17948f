"""The native ops, each beside its PyTorch reference, and the choice between them.

`native` runs the CPU kernels of specengine._C, `cuda_ops()` the CUDA kernels. `reference` runs the same calls in
PyTorch on any device; the tests compare the others with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from specengine import _C
from specengine.ops import compact_kv, decoder, layer, linear, tree_attention, verify_tree, weight
from specengine.ops.autotune import LinearChoices
from specengine.ops.coded import linear as coded_linear
from specengine.ops.coded import weight as coded_weight
from specengine.ops.decoder import Pass
from specengine.ops.experts import moe
from specengine.ops.gated_delta import gated_delta
from specengine.ops.layerwise.decoder import LayerOps, LayerwiseDecoder
from specengine.ops.layerwise.fused import FusedOps
from specengine.ops.lora import add_lora
from specengine.utils.build_info import WITHOUT_CUDA
from specengine.utils.switches import is_on


@dataclass(frozen=True)
class Ops:
    """The ops of a target pass and of a cycle; a field has the signature of the function or class of its name.

    formats: of weights.  dequantised: the format of a file's blocks that `formats` does not cover.
    prefill_rows: rows of one prefill pass: enough to be bound by arithmetic, few enough for caches and workspaces.
    layer: the ops of a decoder layer, for drafters with layers of their own.
    on_device: whether a cycle's state lives on the device; the host then reads committed tokens later.
    strict: whether a row's bits are independent of the rows beside it, in prefill, plain decoding and all trees.
    """

    formats: tuple[str, ...]
    dequantised: str
    prefill_rows: int
    on_device: bool
    strict: bool
    expert_unit: int  # rows of an expert's weight are padded to a multiple of it
    empty_weight: Callable[..., weight.Weight]
    pack_linear: Callable[..., None]
    pack_blocks: Callable[..., None] | None
    requantise_blocks: Callable[..., None] | None
    pack_coded: Callable[..., None]
    coded_format: Callable[..., str | None]
    decoder: Callable[..., Pass]
    layer: LayerOps
    linear: Callable[..., torch.Tensor]
    linear_argmax: Callable[..., torch.Tensor]
    tune: Callable[..., None] | None  # measures the products by a layer; not while a graph is captured
    verify_tree: Callable[..., verify_tree.Accepted]
    compact_kv: Callable[..., None]
    compact_states: Callable[..., None]


_native_layer = LayerOps(
    gather_rows=weight.gather_rows,
    rms_norm=layer.rms_norm,
    linear=linear.linear,
    rope_cache=layer.rope_cache,
    tree_attention=tree_attention.tree_attention,
    silu_mul=layer.silu_mul,
    add_lora=add_lora.add_lora,
    gate_heads=layer.gate_heads,
    gated_delta=gated_delta.gated_delta,
    experts=moe.ExpertOps(
        route_rows=moe.route_rows,
        group_pairs=moe.group_pairs,
        expert_linear=moe.expert_linear,
        combine_experts=moe.combine_experts,
        rows=linear.rows_for,
        silu_mul=layer.silu_mul,
        clamped_swiglu=layer.clamped_swiglu,
        rounds=False,
    ),
    rounds=False,
)

native = Ops(
    formats=(*weight.FLOAT_FORMATS, *weight.BLOCK_BYTES),
    dequantised="float32",
    prefill_rows=256,
    on_device=False,
    strict=True,
    expert_unit=_C.PANEL,
    empty_weight=weight.empty_weight,
    pack_linear=weight.pack_linear,
    pack_blocks=weight.pack_blocks,
    requantise_blocks=weight.requantise_blocks,
    pack_coded=weight.pack_coded,
    coded_format=weight.coded_format,
    decoder=decoder.Decoder,
    layer=_native_layer,
    linear=linear.linear,
    linear_argmax=linear.linear_argmax,
    tune=None,
    verify_tree=verify_tree.verify_tree,
    compact_kv=compact_kv.compact_kv,
    compact_states=gated_delta.compact_states,
)

_reference_layer = LayerOps(
    gather_rows=weight.gather_rows_reference,
    rms_norm=layer.rms_norm_reference,
    linear=linear.linear_reference,
    rope_cache=layer.rope_cache_reference,
    tree_attention=tree_attention.tree_attention_reference,
    silu_mul=layer.silu_mul_reference,
    add_lora=add_lora.add_lora_reference,
    gate_heads=layer.gate_heads_reference,
    gated_delta=gated_delta.gated_delta_reference,
    experts=moe.ExpertOps(
        route_rows=moe.route_rows_reference,
        group_pairs=moe.group_pairs_reference,
        expert_linear=moe.expert_linear_reference,
        combine_experts=moe.combine_experts_reference,
        rows=lambda x, _: x,
        silu_mul=layer.silu_mul_reference,
        clamped_swiglu=layer.clamped_swiglu_reference,
        rounds=False,
    ),
    rounds=False,
)

reference = Ops(
    formats=tuple(weight.FLOAT_FORMATS),
    dequantised="float32",
    prefill_rows=256,
    on_device=False,
    strict=False,
    expert_unit=1,
    empty_weight=weight.empty_weight_reference,
    pack_linear=weight.pack_linear_reference,
    pack_blocks=None,
    requantise_blocks=None,
    pack_coded=weight.pack_coded,
    coded_format=weight.coded_format,
    decoder=partial(LayerwiseDecoder, _reference_layer),
    layer=_reference_layer,
    linear=linear.linear_reference,
    linear_argmax=linear.linear_argmax_reference,
    tune=None,
    verify_tree=verify_tree.verify_tree_on_host,
    compact_kv=compact_kv.compact_kv_reference,
    compact_states=gated_delta.compact_states_reference,
)


def cuda_ops(device: torch.device, strict: bool = False) -> Ops:
    """The CUDA kernels; Ops explains strict."""
    choices = LinearChoices(device, strict=strict)
    arrived = tree_attention.arrival_counters(device)
    attention = partial(
        tree_attention.tree_attention_cuda,
        strict=strict,
        arrived=arrived,
        prefetch=is_on("SPECENGINE_PREFETCH"),
    )
    product = partial(linear.linear_cuda, choices=choices)
    layer_ops = LayerOps(
        gather_rows=coded_linear.gather_rows,
        rms_norm=layer.rms_norm,
        linear=product,
        rope_cache=layer.rope_cache,
        tree_attention=attention,
        silu_mul=layer.silu_mul,
        add_lora=add_lora.add_lora,
        gate_heads=layer.gate_heads,
        gated_delta=gated_delta.gated_delta,
        experts=moe.ExpertOps(
            route_rows=moe.route_rows,
            group_pairs=moe.group_pairs,
            expert_linear=moe.expert_linear_cuda,
            combine_experts=moe.combine_experts,
            rows=lambda x, _: x,
            silu_mul=layer.silu_mul,
            clamped_swiglu=layer.clamped_swiglu,
            rounds=True,
        ),
        rounds=True,
        fused=FusedOps(choices, arrived) if is_on("SPECENGINE_FUSE") else None,
    )
    return Ops(
        formats=(*weight.FLOAT_FORMATS, *coded_weight.FORMS),
        dequantised="bfloat16",  # float16 would overflow where activations are large
        prefill_rows=64 if strict else 1024,
        on_device=True,
        strict=strict,
        expert_unit=_C.PANEL,
        empty_weight=coded_weight.empty_weight,
        pack_linear=coded_weight.pack_linear,
        pack_blocks=coded_weight.pack_blocks,
        requantise_blocks=None,
        pack_coded=coded_weight.pack_coded,
        coded_format=coded_weight.coded_format,
        decoder=partial(LayerwiseDecoder, layer_ops),
        layer=layer_ops,
        linear=product,
        linear_argmax=partial(linear.linear_argmax_cuda, choices=choices),
        tune=choices.tune,
        verify_tree=verify_tree.verify_tree,
        compact_kv=compact_kv.compact_kv,
        compact_states=gated_delta.compact_states,
    )


def ops_for(device: torch.device, strict: bool = False) -> Ops:
    """The ops for tensors on `device`; the CPU's are always strict. Raises ValueError if the build has none."""
    if device.type == "cpu":
        return native
    if not _C.cuda_architectures:
        raise ValueError(f"device: specengine was {WITHOUT_CUDA}")
    return cuda_ops(device, strict)
