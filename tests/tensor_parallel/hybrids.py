"""Tiny hybrids in one process and in two, and what both of them say."""

from __future__ import annotations

from pathlib import Path

import torch

from specengine import Engine, SamplingParams
from specengine.models.checkpoint import open_checkpoint
from specengine.models.checkpoint_base import CPU
from specengine.models.transformer import load_transformer
from specengine.ops import native
from specengine.tensor_parallel.loading import LoadedModel, load_model
from specengine.tensor_parallel.parallel_transformer import load_parallel_transformer
from tests.drafters.mtp_files import mtp_state, write_mtp
from tests.models.hybrid_files import write_hybrid

UNEVEN = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}  # one key head in rank 0, two in rank 1
Spoken = list[tuple[list[int], list[dict[int, float]] | None]]


def write_folder(folder: Path, family: str, **changes: int) -> Path:
    """Writes a hybrid of 8 layers, with the network of an MTP drafter in the folder `mtp` of it."""
    write_hybrid(folder, family, **(changes or UNEVEN))
    config = open_checkpoint(folder).config
    torch.manual_seed(7)
    write_mtp(folder / "mtp", mtp_state(config, config.moe))
    return folder


def load_pair(path: Path, dtype: str = "float32", size: int = 2) -> list[LoadedModel]:
    """Loads a model in one process and in several."""
    return [load_model(path, device="cpu", dtype=dtype, tensor_parallel=processes) for processes in (1, size)]


def load_bare_pair(path: Path) -> list[LoadedModel]:
    """As load_pair, of a file without a tokenizer."""
    checkpoint = open_checkpoint(path)
    one = load_transformer(checkpoint, "auto", CPU)
    several = load_parallel_transformer(checkpoint, str(path), "auto", 2, CPU, native)
    return [LoadedModel(str(path), "auto", target, None, frozenset()) for target in (one, several)]


def spoken(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Spoken:
    """Tokens and log-probabilities of every answer."""
    return [(output.token_ids, output.logprobs) for output in engine.generate(prompts, params)]
