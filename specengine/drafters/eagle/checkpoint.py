"""EAGLE networks from their checkpoints, in every known layout: names, optional norms, reduced vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine.drafters.eagle.checkpoint_parts import CheckpointParts
from specengine.drafters.eagle.eagle1_network import Eagle1Network
from specengine.drafters.eagle.eagle3_network import Eagle3Network, Eagle3Norms
from specengine.drafters.eagle.network import EagleNetwork
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer

MASK_STATE = "mask_hidden"  # a tensor that only P-EAGLE has


@dataclass(frozen=True)
class LoadedEagle:
    """A drafter's network and its relation to the target.

    hidden_state_layers: layers of the target whose input it reads.
    tokens: int32 [Vd], the target's token of each of the drafter's; None: they are the same.
    """

    network: EagleNetwork
    hidden_state_layers: tuple[int, ...]
    tokens: torch.Tensor | None


def load_eagle1(checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> LoadedEagle:
    """Loads EAGLE-1 or -2. Raises ValueError naming a part that does not fit the target, is missing or unexpected."""
    parts = CheckpointParts(checkpoint, target, dtype)
    if MASK_STATE in parts.checkpoint.tensors:
        raise checkpoint.error("is a P-EAGLE drafter; use p-eagle:PATH")
    if "d2t" in parts.checkpoint.tensors or "layers.0.hidden_norm.weight" in parts.checkpoint.tensors:
        raise checkpoint.error("is an EAGLE-3 drafter; use eagle3:PATH")
    if parts.hidden != target.config.hidden_size:
        raise checkpoint.error(f"hidden_size is {parts.hidden}, the target's is {target.config.hidden_size}")
    parts.checkpoint.expect("fc.weight", parts.hidden, 2 * parts.hidden)
    parts.expect_layers(first_columns=parts.hidden, first_norms=())
    parts.ignore("lm_head.weight")  # a copy of the target's
    parts.expect_nothing_else("fc.bias", "layers.0.input_layernorm.weight")
    network = Eagle1Network(parts.loader.linear("fc"), parts.network_parts(target.head))
    return LoadedEagle(network, (), None)


def load_eagle3(
    checkpoint: DraftCheckpoint, target: Transformer, dtype: str, hidden_state_layers: Sequence[int] = ()
) -> LoadedEagle:
    """Loads EAGLE-3 or 3.1. Raises ValueError as load_eagle1 does.

    hidden_state_layers: layers of the target, instead of those that the checkpoint names.
    """
    parts = CheckpointParts(checkpoint, target, dtype)
    if MASK_STATE in parts.checkpoint.tensors:
        raise checkpoint.error("is a P-EAGLE drafter; use p-eagle:PATH")
    return read_eagle3(parts, hidden_state_layers)


def read_eagle3(parts: CheckpointParts, hidden_state_layers: Sequence[int] = (), *others: str) -> LoadedEagle:
    """Reads an EAGLE-3 network, as load_eagle3 does. others: names of tensors that the caller reads."""
    checkpoint, target, hidden = parts.checkpoint, parts.target, parts.hidden
    tensors = checkpoint.tensors
    if "layers.0.hidden_norm.weight" not in tensors:
        raise checkpoint.error("tensor 'midlayer.hidden_norm.weight' is missing; is this EAGLE-1 or -2 (eagle:PATH)?")
    if "fc.weight" not in tensors and hidden != target.config.hidden_size:
        raise checkpoint.error(f"tensor 'fc.weight' is missing, and hidden_size {hidden} is not the target's")
    order = _layers_read(parts, target, hidden_state_layers) if "fc.weight" in tensors else []
    parts.expect_layers(first_columns=2 * hidden, first_norms=("input_layernorm", "hidden_norm"))
    checkpoint.expect("norm.weight", hidden)
    tokens, head = parts.vocabulary(target)
    each = _norms_before_fc(parts, len(order))
    parts.expect_nothing_else("fc.bias", "norm.weight", "d2t", "lm_head.weight", "input_norm.weight", *each, *others)
    loader, fields = parts.loader, checkpoint.fields
    norms = Eagle3Norms(
        embedding=loader.vector("layers.0.input_layernorm.weight"),
        hidden_state=loader.vector("layers.0.hidden_norm.weight"),
        out=loader.vector("norm.weight"),
        all_layers=loader.vector_if_any("input_norm.weight"),
        each_layer=tuple(loader.vector(name) for name in each),
        before_residual=fields.get("norm_before_residual", bool, False),
        feed_back=fields.get("norm_output", bool, False),
    )
    rising = tuple(sorted(set(order)))
    fc = loader.linear("fc") if order else None
    network = Eagle3Network([rising.index(layer) for layer in order], norms, fc, parts.network_parts(head))
    return LoadedEagle(network, rising, tokens)


def _norms_before_fc(parts: CheckpointParts, count: int) -> list[str]:
    """Checks the norms before fc, of each of `count` layers or of all together; returns the names of the former.

    A file has them where it has their tensors. Raises ValueError where config.json says the opposite.
    """
    checkpoint, width = parts.checkpoint, parts.target.config.hidden_size
    fields, tensors = checkpoint.fields, checkpoint.tensors
    each = [f"fc_norm.{i}.weight" for i in range(count)]
    found = any(name.startswith("fc_norm.") for name in tensors)
    for key, tensor, there in (
        ("fc_norm", "fc_norm.0.weight", found),
        ("use_aux_norm", "fc_norm.0.weight", found),
        ("norm_before_fc", "input_norm.weight", "input_norm.weight" in tensors),
    ):
        if fields.get(key, bool, there) != there:
            raise fields.error(key, f"contradicts the tensors: '{tensor}' is {'there' if there else 'missing'}")
    if "input_norm.weight" in tensors:
        if found:
            raise checkpoint.error("has tensors 'fc_norm.*' and 'input_norm.weight'; expected norms of one kind")
        checkpoint.expect("input_norm.weight", count * width)
    if not found:
        return []
    for name in each:
        checkpoint.expect(name, width)
    return each


def _layers_read(parts: CheckpointParts, target: Transformer, hidden_state_layers: Sequence[int]) -> list[int]:
    """Returns the layers whose input fc reads, in the order of its columns."""
    fields, count, width = parts.checkpoint.fields, target.config.num_layers, target.config.hidden_size
    name = "eagle_aux_hidden_state_layer_ids"
    by_outputs = fields.data.get(name) is None and fields.data.get("target_layer_ids") is not None  # as DeepSpec does
    name = "target_layer_ids" if by_outputs else name
    listed = fields.get(name, list, None)
    if listed is not None and any(type(layer) is not int for layer in listed):
        raise fields.error(name, f"must be a list of layers, got {listed!r}")
    if hidden_state_layers:
        layers = list(hidden_state_layers)
    elif listed:
        # In an eagle_config, as SpecForge and ModelOpt write it, layers are numbered by their outputs too.
        grouped = fields.data.get("eagle_config")
        layers = [layer + (by_outputs or (isinstance(grouped, dict) and name in grouped)) for layer in listed]
    else:
        layers = [2, count // 2, count - 3]
    if (number := fields.get("num_aux_hidden_states", int, len(layers))) != len(layers):
        raise fields.error("num_aux_hidden_states", f"is {number}, but {len(layers)} layers are read: {layers}")
    if any(not 0 <= layer <= count for layer in layers):
        raise parts.checkpoint.error(f"reads the input of layers {layers} of the target, which has {count}")
    shape, expected = parts.checkpoint.tensors["fc.weight"].shape, (parts.hidden, len(layers) * width)
    if shape != expected:
        raise parts.checkpoint.error(
            f"tensor 'fc.weight' has shape {shape}, expected {expected} for features of {len(layers)} layers of the "
            f"target's hidden size {width}"
        )
    return layers
