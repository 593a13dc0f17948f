"""PEFT LoRA folders: reads and checks the matrices of one adapter."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from specengine.models.checkpoint_base import Checkpoint, expected_tensors
from specengine.models.checkpoint_hf import SafetensorsCheckpoint, TorchBinCheckpoint
from specengine.models.config import ModelConfig
from specengine.models.lora.config import LoraConfig
from specengine.models.lora.hybrids import in_layout, module_shapes
from specengine.models.lora.matrices import LoraMatrices
from specengine.ops.weight import FLOAT_FORMATS

CONFIG = "adapter_config.json"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."
_OF_TEXT = "model.language_model."  # how names begin where peft wrapped a model of text and vision


class _SafetensorsFile(SafetensorsCheckpoint):
    filename = "adapter_model.safetensors"


class _TorchFile(TorchBinCheckpoint):
    filename = "adapter_model.bin"


def read_lora(folder: str | Path, config: ModelConfig) -> dict[str, LoraMatrices]:
    """Reads an adapter of a model of this configuration; by module, such as `model.layers.0.mlp.up_proj`.

    Raises FileNotFoundError for a missing file. Raises ValueError for settings or modules that are not plain LoRA of
    matrices of attention, gated delta rule and MLP. Tensors that are missing, have no place, another shape or no finite
    values raise it too.
    """
    folder = Path(folder)
    lora = LoraConfig.read(folder / CONFIG)
    tensors = _open(folder)
    wrapped = any(name.startswith(f"{_PREFIX}{_OF_TEXT}") for name in tensors.tensors)
    stem = _OF_TEXT if wrapped else "model."
    shapes = {module.replace("model.", stem, 1): shape for module, shape in _matrix_shapes(config).items()}
    modules = [module for module in shapes if lora.targets(module)]
    _check_names(tensors, lora, modules, config)
    read = {module: _read_module(tensors, module, shapes[module], lora) for module in modules}
    return in_layout({module.replace(stem, "model.", 1): matrices for module, matrices in read.items()}, config)


def _open(folder: Path) -> Checkpoint:
    for kind in (_SafetensorsFile, _TorchFile):
        if (folder / kind.filename).is_file():
            return kind(folder)
    raise FileNotFoundError(f"{folder}: holds neither {_SafetensorsFile.filename} nor {_TorchFile.filename}")


def _matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Lists the matrices that adapters may change; experts, the shared one among them, take none."""
    named = ((name.removesuffix(".weight"), shape) for name, shape in expected_tensors(config).items())
    shapes = {name: shape for name, shape in named if name.endswith(MODULES) and "expert" not in name}
    for layer in range(config.num_layers):
        if (delta := config.layer_gated_delta(layer)) is not None:
            shapes = {name: shape for name, shape in shapes.items() if f".{layer}.linear_attn." not in name}
            own = module_shapes(config, delta)
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def _check_names(tensors: Checkpoint, lora: LoraConfig, modules: list[str], config: ModelConfig) -> None:
    delta = config.gated_delta
    convolutions = [f"layers.{layer}.linear_attn.conv1d" for layer in sorted(delta.layers)] if delta else []
    for end in ("model.embed_tokens", "lm_head", *convolutions):
        named = lora.target_modules != "all-linear" and lora.targets(end)
        if named or any(f".{end}.lora_" in name for name in tensors.tensors):
            supported = [
                *MODULES,
                *(name.rpartition(".")[2] for name in (module_shapes(config, delta) if delta else ())),
            ]
            raise ValueError(f"{tensors.source}: it adapts {end}; supported are {', '.join(supported)}")
    if not modules:
        raise ValueError(f"{tensors.source}: its target_modules name no matrix of this model")
    expected = {_tensor_name(module, part) for module in modules for part in "AB"}
    if missing := sorted(expected - set(tensors.tensors)):
        raise ValueError(f"{tensors.source}: tensor '{missing[0]}' is missing ({len(missing)} missing in all)")
    if extra := sorted(set(tensors.tensors) - expected):
        raise ValueError(
            f"{tensors.source}: tensor '{extra[0]}' has no place in this model, or is not in target_modules"
        )


def _tensor_name(module: str, part: str) -> str:
    return f"{_PREFIX}{module}.lora_{part}.weight"


def _read_module(tensors: Checkpoint, module: str, shape: tuple[int, ...], lora: LoraConfig) -> LoraMatrices:
    rank, (rows, columns) = lora.rank_of(module), shape
    a = _read(tensors, _tensor_name(module, "A"), (rank, columns))
    b = _read(tensors, _tensor_name(module, "B"), (rows, rank))
    scale = lora.scale_of(module)
    if not math.isfinite(scale):
        raise ValueError(f"{tensors.source}: the scale of {module} is {scale}")
    return LoraMatrices(a, b, scale)


def _read(tensors: Checkpoint, name: str, shape: tuple[int, int]) -> torch.Tensor:
    info = tensors.tensors[name]
    if info.shape != shape:
        raise ValueError(f"{tensors.source}: tensor '{name}' has shape {info.shape}, expected {shape}")
    if info.dtype not in FLOAT_FORMATS:
        raise ValueError(
            f"{tensors.source}: tensor '{name}' has type {info.dtype}, expected {', '.join(FLOAT_FORMATS)}"
        )
    values = tensors.read(name)
    if not values.isfinite().all():
        raise ValueError(f"{tensors.source}: tensor '{name}' has values that are not finite")
    return values
