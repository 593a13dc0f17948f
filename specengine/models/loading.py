"""From a model's name to its weights and tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specengine.hub import resolve_model
from specengine.models.checkpoint import Checkpoint, GGUFCheckpoint, RandomCheckpoint, open_checkpoint
from specengine.models.config import ModelConfig
from specengine.models.transformer import Transformer
from specengine.ops import Ops
from specengine.text import Tokenizer
from specengine.types import SamplingParams

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A target ready to run; several engines may share it."""

    name: str
    target: Transformer
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]

    @property
    def config(self) -> ModelConfig:
        return self.target.config

    def check_place(self, device: str, dtype: str) -> None:
        """Raises ValueError where an engine asks for another device or dtype than this model was loaded with."""
        loaded = {"device": self.target.device.type, "dtype": str(self.target.dtype).removeprefix("torch.")}
        for name, asked in (("device", device), ("dtype", dtype)):
            if asked not in ("auto", loaded[name]):
                raise ValueError(f"{name}: this model was loaded with {loaded[name]}, got {asked!r}")

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError for parameters that this model cannot honour."""
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: this model has no tokenizer, so no stop string can be recognised")
        for token in params.logit_bias or {}:
            if token >= self.config.vocab_size:
                raise ValueError(f"logit_bias: token id {token} is not in 0 to {self.config.vocab_size - 1}")


def load_model(model: str | Path, *, device: str = "auto", dtype: str = "auto", ops: Ops | None = None) -> LoadedModel:
    """Finds (or fetches) a model and loads it. Raises ValueError, FileNotFoundError or ModelFetchError."""
    check_model(model)
    where = _device(device)
    _check_dtype(dtype)
    checkpoint = open_checkpoint(resolve_model(model))
    tokenizer = _tokenizer(checkpoint)
    target = Transformer(checkpoint, _dtype(dtype, checkpoint), where, ops)
    eos = {*checkpoint.config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}
    return LoadedModel(str(model), target, tokenizer, frozenset(eos))


def check_model(model: object) -> None:
    """Raises ValueError for what cannot be a model's name."""
    if not isinstance(model, str | os.PathLike) or not str(model):
        raise ValueError(f"model: expected a name or a path, got {model!r}")


def _device(name: str) -> torch.device:
    if not isinstance(name, str) or name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but PyTorch sees no CUDA device here")
    # auto stays on the CPU until the CUDA ops have kernels of their own: the CPU ops are the fast ones today.
    return torch.device("cuda" if name == "cuda" else "cpu")


def _check_dtype(name: str) -> None:
    if not isinstance(name, str) or name not in ("auto", *DTYPES):
        raise ValueError(f"dtype: expected auto, {' or '.join(DTYPES)}, got {name!r}")


def _dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """`auto` keeps the checkpoint's own type where the kernels have it; anything else is computed in float32."""
    if name == "auto":
        return DTYPES.get(checkpoint.config.dtype or "float32", torch.float32)
    return DTYPES[name]


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    if isinstance(checkpoint, GGUFCheckpoint):
        return Tokenizer.from_gguf(checkpoint.file.metadata)
    if isinstance(checkpoint, RandomCheckpoint):
        return None
    return Tokenizer.find(checkpoint.source)
