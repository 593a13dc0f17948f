"""adapter_config.json of a PEFT LoRA folder: which matrices it adapts, with which rank and scale."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specengine.utils.json_fields import Fields
from specengine.utils.json_file import read_json_object

MOST_RANK = 512  # kMostLoraRank in csrc/ops/lora.h

# What these say changes no arithmetic: provenance, training, options of features that are off.
_IGNORED = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "runtime_config"),
    )
)
_READ = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
        *("use_rslora", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"),
    )
)
# Other initial values are taken out of the model's own weights, so that a saved adapter needs the changed model.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraConfig:
    """Which modules an adapter adapts, by the rules of PEFT.

    target_modules: endings of module names, or a regex of whole ones.  layers: numbers, empty for all.
    patterns: regexes of a module's ending -> its own rank or alpha; the first that fits counts.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    rslora: bool
    layers: tuple[int, ...]
    layers_patterns: tuple[str, ...]

    @staticmethod
    def read(path: Path) -> LoraConfig:
        """Reads adapter_config.json. Raises FileNotFoundError, and ValueError naming a field that it cannot honour."""
        fields = Fields(read_json_object(path), str(path))
        kind = fields.get("peft_type", str)
        if kind != "LORA":
            raise fields.error("peft_type", f"is {kind!r}, only LORA is supported")
        _check_unsupported(fields)
        layers = fields.data.get("layers_to_transform")
        try:
            config = LoraConfig(
                rank=fields.get("r", int, 8),
                alpha=fields.get("lora_alpha", float, 8.0),
                target_modules=_names(fields, "target_modules"),
                exclude_modules=_names(fields, "exclude_modules"),
                rank_pattern=fields.get("rank_pattern", dict, {}),
                alpha_pattern=fields.get("alpha_pattern", dict, {}),
                rslora=fields.get("use_rslora", bool, False),
                layers=(layers,) if type(layers) is int else fields.ids("layers_to_transform"),
                layers_patterns=_listed(_names(fields, "layers_pattern")),
            )
            config.check()
        except (re.error, RecursionError) as error:
            raise ValueError(f"{path}: one of its regexes cannot be read: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
        return config

    def check(self) -> None:
        """Raises ValueError for a rank or an alpha out of range, and re.error for a bad regex."""
        for rank in (self.rank, *self.rank_pattern.values()):
            if type(rank) is not int or not 1 <= rank <= MOST_RANK:
                raise ValueError(f"field 'r' or 'rank_pattern' has {rank!r}, expected 1 to {MOST_RANK}")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
                raise ValueError(f"field 'lora_alpha' or 'alpha_pattern' has {alpha!r}, expected a finite number")
        if not self.target_modules:
            raise ValueError("field 'target_modules' is missing or empty")
        patterns = [*self.rank_pattern, *self.alpha_pattern]
        for modules in (self.target_modules, self.exclude_modules):
            patterns += [modules] if isinstance(modules, str) else []
        for pattern in patterns:
            re.compile(pattern)

    def targets(self, module: str) -> bool:
        """Returns whether PEFT adapts the linear layer of this name, as check_target_module_exists does."""
        if self.exclude_modules and _named(module, self.exclude_modules):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or bool(re.fullmatch(self.target_modules, module))
        if module in self.target_modules:
            return True
        return _named(module, self.target_modules) and (not self.layers or self._layer_of(module) in self.layers)

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module."""
        return _value_for(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's B A."""
        alpha, rank = _value_for(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def _layer_of(self, module: str) -> int | None:
        """Returns the number of a module's layer: the first number behind one of the patterns, or behind any name."""
        for pattern in self.layers_patterns:
            if found := re.match(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", module):
                return int(found["idx"])
        found = None if self.layers_patterns else re.match(r".*?\.[^.]*\.(?P<idx>\d+)\.", module)
        return int(found["idx"]) if found else None


def _check_unsupported(fields: Fields) -> None:
    """Raises ValueError for a feature that changes an adapter's arithmetic in a way that is not built, by its name."""
    bias = fields.data.get("bias", "none")
    if bias != "none":
        raise fields.error("bias", f"is {bias!r}: adapters with biases are not supported")
    init = fields.data.get("init_lora_weights")
    if isinstance(init, dict | list) or init not in _INITS:
        raise fields.error(
            "init_lora_weights",
            f"is {str(init)[:80]!r}: such an adapter belongs to changed weights; save it converted to LoRA",
        )
    for name, value in fields.data.items():
        if name not in _IGNORED | _READ and value not in (None, False, "", [], {}):
            raise fields.error(name, f"is {str(value)[:80]!r}, which is not supported")


def _names(fields: Fields, name: str) -> tuple[str, ...] | str:
    value = fields.data.get(name)
    if value is None or isinstance(value, str):
        return value or ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise fields.error(name, f"must be a string or a list of strings, got {str(value)[:80]!r}")
    return tuple(value)


def _listed(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _named(module: str, names: tuple[str, ...] | str) -> bool:
    if isinstance(names, str):
        return bool(re.fullmatch(names, module))
    return module in names or any(module.endswith(f".{name}") for name in names)


def _value_for(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first pattern that fits a module's ending, as PEFT's get_pattern_key finds it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
