"""Loads a model by name: its weights, in one process or several, and its tokenizer."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from specengine import _C
from specengine.constraints import Grammars
from specengine.hub.huggingface import resolve_model
from specengine.models.checkpoint import Checkpoint, RandomCheckpoint, open_checkpoint
from specengine.models.config import ModelConfig
from specengine.models.transformer import Transformer, load_transformer
from specengine.models.weights import check_dtype
from specengine.ops import Ops, native, ops_for
from specengine.ops.weight import FLOAT_FORMATS
from specengine.tensor_parallel.parallel_transformer import load_parallel_transformer
from specengine.tokenizer import Tokenizer
from specengine.types import SamplingParams
from specengine.utils.build_info import WITHOUT_CUDA
from specengine.utils.collection import collection_paused
from specengine.utils.forks import check_not_forked, mark_loaded
from specengine.utils.spec_string import check_range

MOST_PROCESSES = 64  # the largest tensor_parallel


@dataclass(frozen=True)
class LoadedModel:
    """A target ready to run; several engines may share it.

    dtype: of all weights; "auto" where they have quantised or several formats.
    """

    name: str
    dtype: str
    target: Transformer
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]

    @property
    def config(self) -> ModelConfig:
        return self.target.config

    @cached_property
    def grammars(self) -> Grammars:
        """The compiled constraints of all its engines."""
        return Grammars(self.tokenizer, self.eos_token_ids, self.config.vocab_size)

    def check_place(self, device: str, dtype: str, strict: bool, tensor_parallel: int = 1) -> None:
        """Raises ValueError for engine options that differ from those that this model was loaded with."""
        if strict and not self.target.ops.strict:
            raise ValueError("strict: this model was loaded without it")
        loaded = {"device": self.target.device.type, "dtype": self.dtype}
        for name, asked in (("device", device), ("dtype", dtype)):
            if asked not in ("auto", loaded[name]):
                raise ValueError(f"{name}: this model was loaded with {loaded[name]}, got {asked!r}")
        if tensor_parallel not in (1, self.target.tensor_parallel):
            size = self.target.tensor_parallel
            raise ValueError(f"tensor_parallel: this model was loaded with {size}, got {tensor_parallel}")

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError for parameters that this model cannot honour."""
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: this model has no tokenizer, so no stop string can be recognised")
        for token in params.logit_bias or {}:
            if token >= self.config.vocab_size:
                raise ValueError(f"logit_bias: token id {token} is not in 0 to {self.config.vocab_size - 1}")
        for token in params.stop_token_ids:
            if token >= self.config.vocab_size:
                raise ValueError(f"stop_token_ids: token id {token} is not in 0 to {self.config.vocab_size - 1}")


@collection_paused()
def load_model(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    strict: bool = False,
    tensor_parallel: int = 1,
    ops: Ops | None = None,
) -> LoadedModel:
    """Finds or fetches a model and loads it. strict, tensor_parallel: see Engine.

    Raises ValueError, FileNotFoundError, ModelFetchError, RankFailed, or RuntimeError after a fork.
    """
    check_not_forked()
    check_model(model)
    check_range("tensor_parallel", tensor_parallel, 1, MOST_PROCESSES)
    if not isinstance(strict, bool):
        raise ValueError(f"strict: expected True or False, got {strict!r}")
    where = resolve_device(device)
    ops = ops or ops_for(where, strict)
    check_dtype(dtype, ops)
    if tensor_parallel > 1:
        _check_ranks(tensor_parallel, where, ops)
    path = resolve_model(model)
    checkpoint = open_checkpoint(path)
    tokenizer = _tokenizer(checkpoint)
    mark_loaded()
    target = _target(checkpoint, str(path), dtype, where, ops, tensor_parallel)
    eos = {*checkpoint.config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}
    if len(target.formats) == 1 and target.formats <= set(FLOAT_FORMATS):
        (dtype,) = target.formats
    return LoadedModel(str(model), dtype, target, tokenizer, frozenset(eos))


def _check_ranks(size: int, device: torch.device, ops: Ops) -> None:
    if not (ops is native or ops.on_device):
        raise ValueError("tensor_parallel: the other processes have the kernels of a device, got other ops")
    if device.type == "cuda" and (device.index or 0) + size > (seen := torch.cuda.device_count()):
        raise ValueError(f"tensor_parallel: expected a GPU for each of {size} from {device} on, got {seen}")


def _target(
    checkpoint: Checkpoint, path: str, dtype: str, device: torch.device, ops: Ops, tensor_parallel: int
) -> Transformer:
    if tensor_parallel == 1:
        return load_transformer(checkpoint, dtype, device, ops)
    return load_parallel_transformer(checkpoint, path, dtype, tensor_parallel, device, ops)


def load_tokenizer(model: str | Path) -> Tokenizer | None:
    """Loads the tokenizer of a model without its weights; None for a model without one. Raises as load_model."""
    check_model(model)
    return _tokenizer(open_checkpoint(resolve_model(model)))


def check_model(model: object) -> None:
    """Raises ValueError for a value that is neither a name nor a path."""
    if not isinstance(model, str | os.PathLike) or not str(model):
        raise ValueError(f"model: expected a name or a path, got {model!r}")


def resolve_device(name: str) -> torch.device:
    """Chooses the device of `auto`, `cpu` or `cuda`. Raises ValueError for another name, and for CUDA without a GPU."""
    if not isinstance(name, str) or name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but PyTorch sees no CUDA device here")
    if name == "auto":
        sees = torch.cuda.is_available()
        name = "cuda" if sees and _C.cuda_architectures else "cpu"
        if sees and not _C.cuda_architectures:
            warnings.warn(f"device: auto takes the CPU although PyTorch sees a GPU: {WITHOUT_CUDA}", stacklevel=3)
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    if checkpoint.metadata is not None:
        return Tokenizer.from_gguf(checkpoint.metadata)
    if isinstance(checkpoint, RandomCheckpoint):
        return None
    return Tokenizer.find(checkpoint.source)
