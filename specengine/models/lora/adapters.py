"""The adapters of an engine: reads their folders, and lays their matrices side by side for the ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specengine.models.config import ModelConfig
from specengine.models.lora.folder import read_lora
from specengine.models.lora.hybrids import places
from specengine.models.lora.matrices import LoraMatrices
from specengine.models.transformer import Transformer
from specengine.ops.lora.matrices import LoraLayer, LoraProjection, stack_lora


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter; requests of the same object may learn from each other's texts.  index: its place in the ops."""

    name: str
    index: int


class Adapters:
    """Adapters that the requests of an engine may choose, by name.

    layers: what they add to each decoder layer of `target`, and of any model of its sizes on its device.
    """

    def __init__(self, names: Sequence[str], layers: Sequence[LoraLayer], target: Transformer) -> None:
        self._named = {name: Adapter(name, index) for index, name in enumerate(names)}
        self._sizes, self._device = _sizes(target.config), target.device
        self.layers = tuple(layers)

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names, in the order given."""
        return tuple(self._named)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        projections = (projection for layer in self.layers for projection in layer.projections)
        return sum(module.a.nbytes + module.b.nbytes for each in projections for module in each.modules)

    def check_fits(self, target: Transformer) -> None:
        """Raises ValueError for a model of other sizes, or on another device."""
        if _sizes(target.config) != self._sizes or target.device != self._device:
            raise ValueError("adapters: they were loaded for a model of other sizes or on another device")

    def find(self, name: str) -> Adapter:
        """Returns the adapter of a name. Raises ValueError listing the names where there is none."""
        if name not in self._named:
            raise ValueError(f"adapter: this engine has {', '.join(self._named) or 'none'}, got {name[:100]!r}")
        return self._named[name]


def load_adapters(folders: Mapping[str, str | Path], target: Transformer) -> Adapters:
    """Reads PEFT LoRA folders for a target.  folders: by name.

    The matrices are kept in float32 beside float32 weights, else in the 16 bits of the target's weights; beside
    quantised weights in float16. Raises FileNotFoundError and ValueError naming the adapter.
    """
    check_folders(folders)
    if target.tensor_parallel > 1:
        raise ValueError(f"adapters: a target under tensor_parallel={target.tensor_parallel} cannot have any")
    read: list[dict[str, LoraMatrices]] = []
    for name, folder in folders.items():
        try:
            read.append(read_lora(Path(folder).expanduser(), target.config))
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"adapters: {name}: {error}") from error
    form = str(target.cache_dtype).removeprefix("torch.")
    names = [*folders]
    layers = [
        _layer(target.config, number, names, read, form, target.device) for number in range(target.config.num_layers)
    ]
    return Adapters(names, layers, target)


def _sizes(config: ModelConfig) -> tuple[object, ...]:
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    return config.num_layers, config.hidden_size, config.intermediate_size, *heads, config.gated_delta


def check_folders(folders: object) -> None:
    """Raises ValueError for a value that does not map names to folders."""
    if not isinstance(folders, Mapping) or not folders:
        raise ValueError(f"adapters: expected a mapping of names to folders, got {folders!r}")
    for name, folder in folders.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ValueError(f"adapters: expected a printable name, got {name!r}")
        if not isinstance(folder, str | Path) or not str(folder):
            raise ValueError(f"adapters: {name}: expected a folder, got {folder!r}")


def _layer(
    config: ModelConfig,
    number: int,
    names: Sequence[str],
    adapters: Sequence[Mapping[str, LoraMatrices]],
    form: str,
    device: torch.device,
) -> LoraLayer:
    def projection(modules: Mapping[str, int]) -> LoraProjection:
        stacked = []
        for module, first in modules.items():
            key = f"model.layers.{number}.{module}"
            found = [adapter.get(key) for adapter in adapters]
            if any(found):
                matrices = [None if each is None else (each.a, each.b, each.scale) for each in found]
                try:
                    stacked.append(stack_lora(matrices, form, first, device))
                except ValueError as error:
                    raise ValueError(f"adapters: {', '.join(names)}: {key}: {error}") from None
        return LoraProjection(tuple(stacked))

    return LoraLayer(**{name: projection(modules) for name, modules in _places(config, number).items()})


def _places(config: ModelConfig, number: int) -> dict[str, dict[str, int]]:
    """Returns the matrices of each projection of a layer, and the row of the projection where each begins."""
    mlp = {
        "gate_up": {"mlp.gate_proj": 0, "mlp.up_proj": config.intermediate_size},
        "down": {"mlp.down_proj": 0},
    }
    if (delta := config.layer_gated_delta(number)) is not None:
        return places(delta, config.hidden_size) | mlp
    keys = config.num_kv_heads * config.head_dim
    queries = config.num_heads * config.head_dim * (2 if config.attention_gate else 1)
    firsts = {"self_attn.q_proj": 0, "self_attn.k_proj": queries, "self_attn.v_proj": queries + keys}
    return {"qkv": firsts, "attention_out": {"self_attn.o_proj": 0}} | mlp
