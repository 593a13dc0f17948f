"""Quantised folders as checkpoints: groups stored tensors by module, and decides by the tensors that each has."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from specengine.models.checkpoint_base import ENDS, Checkpoint, TensorInfo, layer_tensors
from specengine.models.config import ModelConfig
from specengine.models.quantised.awq import AwqGemmWeight, AwqGemvWeight
from specengine.models.quantised.bitsandbytes import BitsAndBytes4
from specengine.models.quantised.files import QuantisedFiles
from specengine.models.quantised.fp4 import Fp4Weight, Mxfp6Weight
from specengine.models.quantised.fp8 import SCALES, E5m2Weight, Fp8Weight
from specengine.models.quantised.gptq import GptqWeight
from specengine.models.quantised.int8 import BitsAndBytes8, Int8Weight
from specengine.models.quantised.packed_int import PackedIntWeight
from specengine.models.quantised.settings import FLOAT8, Settings
from specengine.models.quantised.stored import QuantisedWeight, StoredModule
from specengine.ops.coded.rows import CodedRows
from specengine.ops.weight import FLOAT_FORMATS

# of activations and of key/value caches: they say nothing of weights
_NOT_OF_WEIGHTS = re.compile(
    r"(input|output|activation|act|[qkv]|kv|prob|softmax)(_cache)?_(scale|scale_ub|scale_inv|scaling_factor"
    r"|global_scale|zero_point|amax|bias)"
    r"|qscale_act|pre_quant_shape"
)
_OF_WEIGHTS = (*SCALES, "weight_zero_point", "weight_global_scale", "weight_scale_2", "qzeros", "scales", "SCB")


class QuantisedCheckpoint(Checkpoint):
    """A folder of safetensors with quantised weights, each under the name and in the shape that it had before.

    Raises ValueError for a weight whose other tensors are missing or do not fit it.
    """

    def __init__(self, folder: str | Path, settings: Settings) -> None:
        self._files = QuantisedFiles(folder)
        self.source = self._files.source
        self.tensors = {}
        self._weights: dict[str, QuantisedWeight] = {}
        for name, stored in _modules(self._files).items():
            weight = _weight(stored, settings)
            ends = {end for end in stored.tensors if not _NOT_OF_WEIGHTS.fullmatch(end)}
            if weight is not None:
                ends -= weight.ends
                if "weight" in ends:
                    raise stored.error("weight", f"lies beside the codes of {', '.join(sorted(weight.ends))}")
                full = f"{name}.weight"
                self._weights[full] = weight
                self.tensors[full] = TensorInfo(weight.shape, "float32", weight.kernel_coding)
            for end in ends:
                if not (end == "bias" and weight is not None and self._is_spare_bias(stored)):
                    self.tensors[f"{name}.{end}" if name else end] = stored.tensors[end]

    @cached_property
    def config(self) -> ModelConfig:  # type: ignore[override]
        """The folder's, untied where the head has codes, or where the embedding has and a head is beside it."""
        embedding, head = ENDS
        coded = {name.replace("model.language_model.", "model.", 1) for name in self._weights}  # of text and vision
        apart = head in coded or (embedding in coded and head in self.tensors)
        return replace(self._files.config, tie_embeddings=False) if apart else self._files.config

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        """See Checkpoint."""
        info = self._info(name)
        if info.coding is None:
            return super().read_coded(name, start, stop)
        if not 0 <= start <= stop <= info.shape[0]:
            raise ValueError(f"{self.source}: rows [{start}, {stop}) are outside tensor '{name}' of shape {info.shape}")
        return self._weights[name].coded(start, stop)

    def column_order(self, name: str) -> torch.Tensor | None:
        """See Checkpoint."""
        return self._weights[name].order if self._info(name).coding is not None else None

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        weight = self._weights.get(name)
        out.copy_(self._files.read_rows(name, start, stop) if weight is None else weight.values(start, stop))

    def _is_spare_bias(self, stored: StoredModule) -> bool:
        """Returns whether a bias is all zeros and not the model's: early GPTQ packers gave every layer one."""
        own = stored.name.rpartition(".layers.")[2].partition(".")[2]
        if f"{own}.bias" in layer_tensors(self._files.config, ""):
            return False
        stored.shape("bias", *FLOAT_FORMATS)
        return not stored.whole("bias").any()


def _modules(files: QuantisedFiles) -> dict[str, StoredModule]:
    modules: dict[str, dict[str, TensorInfo]] = {}
    for full, info in files.tensors.items():
        name, inner, end = full.partition(".weight.")  # bitsandbytes: X.weight.absmax
        if inner:
            end = f"weight.{end}"
        else:
            name, _, end = full.rpartition(".")
        modules.setdefault(name, {})[end] = info
    return {name: StoredModule(files, name, tensors) for name, tensors in modules.items()}


def _weight(stored: StoredModule, settings: Settings) -> QuantisedWeight | None:
    """Opens the quantised weight of a module; None for a module without one."""
    tensors = stored.tensors
    scheme = settings.scheme(stored.name)
    if "qweight" in tensors:
        if settings.words == "awq-gemm":
            return AwqGemmWeight(stored, scheme)
        if settings.words == "awq-gemv":
            return AwqGemvWeight(stored, scheme)
        if settings.words in ("gptq", "gptq_v2"):
            return GptqWeight(stored, scheme, less_one=settings.words == "gptq")
        raise stored.error("qweight", f"is of AWQ or GPTQ, which the method {settings.method} does not have")
    if "weight_packed" in tensors:
        if tensors["weight_packed"].dtype == "int32":
            return PackedIntWeight(stored, settings)
        return Mxfp6Weight(stored) if scheme.bits == 6 else Fp4Weight(stored, "weight_packed")
    kind = tensors["weight"].dtype if "weight" in tensors else None
    # the method decides too: a weight without its other tensors is to be missed by their names
    if any(end.startswith("weight.") for end in tensors) or (settings.method == "bitsandbytes" and kind == "uint8"):
        return BitsAndBytes4(stored)
    eights = settings.scheme_of_bytes(stored.name)
    if kind in FLOAT8.values():
        if settings.float8 not in (None, kind):
            raise stored.error("weight", f"has type {kind}, expected {settings.float8} as field 'fmt' says")
        return Fp8Weight(stored, eights) if kind == FLOAT8["e4m3"] else E5m2Weight(stored, eights)
    if kind == "int8":
        return BitsAndBytes8(stored) if "SCB" in tensors else Int8Weight(stored, eights)
    if kind == "uint8":
        return Fp4Weight(stored, "weight")
    for end in _OF_WEIGHTS:
        if end in tensors:
            raise stored.error(
                end, f"belongs to no quantised weight; its module has {', '.join(sorted(tensors))[:200]}"
            )
    return None
