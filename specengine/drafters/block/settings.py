"""What the config.json of a one-pass block drafter says, in every known spelling.

Files of z-lab, JetSpec, DeepSpec, SpecForge and NeMo number the target's layers by their outputs, from 0 on. Those of
the speculators library number them by their inputs. Whatever changes the arithmetic and is not implemented is refused
by the name of its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from specengine.drafters.block.attention import BlockMask
from specengine.drafters.block.config_keys import ConfigKeys
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint

T = TypeVar("T")
PROJECTORS = (None, "dflash", "dspark", "domino")
SPECULATORS = ("dflash", "dflash2", "dspark")  # kinds of block drafters of the speculators library
# Keys that change the forward, with the values that leave it as it is beside null.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "attention_multiplier": (1, 1.0),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
    "attn_logit_softcapping": (),
    "embedding_multiplier": (1, 1.0),
    "is_neox_style": (True,),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "partial_rotary_factor": (1, 1.0),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1, 1.0),
    "rope_is_neox_style": (True,),
    "use_swa": (False,),
}
_FOREIGN = ("gemma", "deepseek")  # of architectures whose layers are others


@dataclass(frozen=True)
class BlockSettings:
    """The facts of one drafter beside the sizes of its layers.

    family: `dflash`, `dspark` or `domino`.  block_size: slots of a block, the anchor's included.
    first_slot: the first one that predicts.  levels: slots that predict.  mask_token: of all slots but the anchor's.
    features: layers of the target whose input is read, in the order of fc's columns.
    masks: of each layer.  embedding_scale, output_multiplier, softcap: see Backbone and head.LogitScale.
    speculators: of the speculators library.
    """

    family: str
    causal: bool
    block_size: int
    first_slot: int
    levels: int
    mask_token: int
    features: tuple[int, ...]
    masks: tuple[BlockMask, ...]
    embedding_scale: float
    output_multiplier: float
    softcap: float
    speculators: bool


def read_settings(checkpoint: DraftCheckpoint, target: ModelConfig) -> BlockSettings:
    """Reads the settings of a checkpoint under the names of this package. Raises ValueError naming the wrong key."""
    keys = ConfigKeys(checkpoint)
    family, speculators = _family(checkpoint, keys), keys.get("speculators_model_type", str, None) is not None
    for name, neutral in _NEUTRAL.items():
        if (value := keys.any(name)) is not None and not any(value is same or value == same for same in neutral):
            raise keys.error(name, f"is {value!r}, which is not supported")
    if keys.get("use_swa", bool, None) is None and (value := keys.any("swa_window_size")) is not None:
        raise keys.error("swa_window_size", f"is {value!r}, which is not supported without use_swa=false")
    keys.check_group()
    _check_target(keys, checkpoint, target)
    block = keys.get("block_size", int, 8) if speculators else keys.get("block_size", int)
    if not 2 <= block <= 128:
        raise keys.error("block_size", f"must be from 2 to 128, got {block}")
    first = _first_slot(keys, family)
    levels = block - 1 if family == "domino" or first else block
    causal, masks = _masks(keys, checkpoint.layer_config().num_layers, speculators)
    mask_token = keys.get("mask_token_id", int)
    if not 0 <= mask_token < target.vocab_size:
        raise keys.error("mask_token_id", f"is {mask_token}, the target has {target.vocab_size} tokens")
    features = _features(keys, target.num_layers, speculators)
    return BlockSettings(
        family=family,
        causal=causal,
        block_size=block,
        first_slot=first,
        levels=levels,
        mask_token=mask_token,
        features=features,
        masks=masks,
        embedding_scale=keys.positive("input_embedding_scale", 1.0),
        output_multiplier=keys.positive("output_multiplier", 1.0),
        softcap=keys.positive("final_logit_softcapping", 0.0),
        speculators=speculators,
    )


def _family(checkpoint: DraftCheckpoint, keys: ConfigKeys) -> str:
    """Recognises the family by tensors and keys."""
    names = checkpoint.tensors
    architectures = keys.any("architectures") or []
    if not isinstance(architectures, list) or any(not isinstance(name, str) for name in architectures):
        raise keys.error("architectures", f"must be a list of names, got {architectures!r}")
    for architecture in architectures:
        if any(other in architecture.lower() for other in _FOREIGN):
            raise keys.error("architectures", f"names {architecture}, whose layers are not supported")
    projector, kind = keys.get("projector_type", str, None), keys.get("speculators_model_type", str, None)
    if projector not in PROJECTORS:
        raise keys.error("projector_type", f"must be {', '.join(filter(None, PROJECTORS))}, got {projector!r}")
    if kind not in (None, *SPECULATORS):
        raise keys.error("speculators_model_type", f"must be {', '.join(SPECULATORS)}, got {kind!r}")
    if projector == "domino" or any(name.startswith("prefix_gru.") for name in names):
        return "domino"
    sequential = ("markov_head.", "confidence_head.")
    spark = "dspark" in (projector, kind) or any("DSpark" in name for name in architectures)
    spark |= projector != "dflash" and keys.any("markov_rank") is not None  # 0 in DeepSpec's files without a head
    if spark or any(name.startswith(sequential) for name in names):
        return "dspark"
    missing = [name for name in ("fc.weight", "hidden_norm.weight") if name not in names]
    if missing or "mask_hidden" in names:
        found = f"tensor '{missing[0]}' is missing" if missing else "tensor 'mask_hidden' makes it a P-EAGLE drafter"
        raise checkpoint.error(f"is no one-pass block drafter: {found}")
    return "dflash"


def _check_target(keys: ConfigKeys, checkpoint: DraftCheckpoint, target: ModelConfig) -> None:
    """Raises ValueError for a drafter of another target."""
    wanted = {
        "num_target_layers": target.num_layers,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }
    for name, size in wanted.items():
        if (own := keys.get(name, int, size)) != size:
            raise keys.error(name, f"is {own}, the target has {size}")


def _first_slot(keys: ConfigKeys, family: str) -> int:
    """Returns 0 where a slot predicts the token behind its own, 1 where it predicts its own."""
    if family == "domino":
        return 0 if keys.get("shift_label", bool) else 1
    return 0 if keys.get("sample_from_anchor", bool, family == "dspark") else 1


def _masks(keys: ConfigKeys, layers: int, speculators: bool) -> tuple[bool, tuple[BlockMask, ...]]:
    """Returns whether all layers are causal in the block, and the mask of each."""
    flags = [keys.get(name, bool, None) for name in ("is_causal", "causal", "causal_head")]
    causal = any(flags)
    open_windows = keys.get("speculators_model_type", str, None) == "dflash2"  # where the file does not say it
    open_windows = keys.get("sliding_window_non_causal", bool, open_windows)
    open_blocks = not causal and (False in flags[:2] or open_windows)
    sliding = _sliding(keys, layers)
    window = keys.get("sliding_window", int, None)
    if any(sliding) and (window is None or window < 1):
        raise keys.error("sliding_window", f"must be positive beside sliding layers, got {window}")
    masks = [
        BlockMask(causal or (slides and not open_blocks), (window or 0) if slides else 0, slides and speculators)
        for slides in sliding
    ]
    return causal, tuple(masks)


def _sliding(keys: ConfigKeys, layers: int) -> list[bool]:
    """Returns which layers have a window."""
    types = keys.any("layer_types")
    if types is None:
        if not keys.get("use_sliding_window", bool, False) or keys.get("sliding_window", int, None) is None:
            return [False] * layers
        full = keys.get("max_window_layers", int, 28)  # the default of transformers
        return [layer >= full for layer in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise keys.error("layer_types", f"must name {' or '.join(known)} for each of {layers} layers, got {types!r}")
    return [kind == known[1] for kind in types]


def _features(keys: ConfigKeys, count: int, speculators: bool) -> tuple[int, ...]:
    """Returns the layers of the target whose input is read, in order. count: layers of the target."""
    name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids = keys.ids(name)
    if speculators:
        read = ids or (2, count // 2, count - 3)
    elif ids:
        read = tuple(layer + 1 for layer in ids)
    else:  # a guess that fits fc may still read other layers than training did
        raise keys.error(name, "is missing; expected the layers of the target whose output fc reads")
    for layer in read:
        if layer == count:
            raise keys.error(name, "names the last layer's output, which trainings read before or behind its norm")
        if not 0 <= layer < count:
            raise keys.error(name, f"names layers {list(ids or read)} of the target, which has {count}")
    return read
