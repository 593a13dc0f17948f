"""Keys of a block drafter's config.json, at its top or in its `dflash_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.utils.json_fields import Fields

T = TypeVar("T")
_MISSING: Any = object()
GROUP = "dflash_config"
# What may stand in the group; the second half is read by training alone.
_KNOWN = {
    *("block_size", "mask_token_id", "target_layer_ids", "causal", "causal_head", "is_causal", "sample_from_anchor"),
    *("projector_type", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label", "target_hidden_size", "num_target_layers"),
    *("attention_sink_bias", "attention_value_scale", "use_swa", "swa_window_size", "logit_scale"),
    *("is_neox_style", "rope_is_neox_style", "layer_types", "sliding_window", "sliding_window_non_causal"),
    *("num_anchors", "loss_decay_gamma", "loss_type", "attention_backend", "confidence_head_alpha", "lambda_base"),
}


class ConfigKeys:
    """Looks a key up in both places. Raises ValueError naming a key that has two values, or a wrong one."""

    def __init__(self, checkpoint: DraftCheckpoint) -> None:
        self._fields = checkpoint.fields
        group = checkpoint.json.get(GROUP)
        if group is not None and not isinstance(group, Mapping):
            raise self._fields.error(GROUP, f"must be an object, got {group!r}")
        self._group: Mapping[str, Any] = group or {}

    def any(self, name: str) -> Any:
        """Returns a value of any type; None where there is none."""
        values = [data[name] for data in (self._group, self._fields.data) if data.get(name) is not None]
        if len(values) == 2 and values[0] != values[1]:
            raise self.error(name, f"is {values[1]!r} and, in {GROUP}, {values[0]!r}")
        return values[0] if values else None

    def get(self, name: str, kind: type[T], default: Any = _MISSING) -> T:
        """Returns a value of a type; an absent or null key returns the default, if there is one."""
        fields = Fields({name: self.any(name)}, self._fields.where)
        return fields.get(name, kind) if default is _MISSING else fields.get(name, kind, default)

    def ids(self, name: str) -> tuple[int, ...]:
        """Returns a list of numbers; empty where there is none."""
        value = self.any(name)
        if value is not None and (not isinstance(value, list) or any(type(item) is not int for item in value)):
            raise self.error(name, f"must be a list of layers, got {value!r}")
        return tuple(value or ())

    def positive(self, name: str, default: float) -> float:
        """Returns a positive, finite factor."""
        value = self.get(name, float, default)
        if value != default and not 0 < value < float("inf"):
            raise self.error(name, f"must be positive and finite, got {value}")
        return value

    def check_group(self) -> None:
        """Raises ValueError for a key of the group that is not known: it may change the forward."""
        for name, value in self._group.items():
            if name not in _KNOWN and value is not None:
                raise self.error(name, f"in {GROUP} is not known, got {value!r}")

    def error(self, name: str, problem: str) -> ValueError:
        """Makes a ValueError that names the file and the key."""
        return self._fields.error(name, problem)
