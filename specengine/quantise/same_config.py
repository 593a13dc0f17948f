"""Checks that the header a writer made describes the model it was made for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch

from specengine.models.config import ModelConfig, MoeConfig
from specengine.models.rope import rope_tables, static_frequencies

# Names of the architecture; rotary settings, which have several spellings; tokens, which the tokenizer has too.
_APART = {"architecture", "rope", "bos_token_id", "eos_token_ids", "dtype"}


def check_same(wanted: ModelConfig, written: ModelConfig, source: str, target: str) -> None:
    """Raises ValueError naming the first field that `target`, a kind of file, cannot hold."""
    theirs = _named_values(written)
    for name, ours in _named_values(wanted).items():
        if _as_stored(ours) != _as_stored(theirs[name]):
            raise ValueError(f"{source}: {target} cannot say that {name} is {ours!r} in this architecture")
    if not _same_angles(wanted, written):
        raise ValueError(f"{source}: {target} cannot say the rotary settings {wanted.rope}")


def _named_values(config: ModelConfig) -> dict[str, Any]:
    """Lists the fields to compare by name, those of the experts one by one; None for those of a dense model."""
    values = {field.name: getattr(config, field.name) for field in fields(ModelConfig) if field.name not in _APART}
    moe = values.pop("moe")
    return values | {f"moe.{field.name}": getattr(moe, field.name, None) for field in fields(MoeConfig)}


def _as_stored(value: Any) -> Any:
    """Rounds floats to float32, the numbers of a GGUF file."""
    return np.float32(value).item() if isinstance(value, float) else value


def _same_angles(ours: ModelConfig, theirs: ModelConfig) -> bool:
    if "dynamic" in (ours.rope.kind, theirs.rope.kind):
        return ours.rope == theirs.rope

    def frequencies(config: ModelConfig) -> torch.Tensor:
        plain = static_frequencies(config.rope, config.head_dim)
        return plain / torch.tensor(config.rope.freq_divisors) if config.rope.freq_divisors else plain

    def factor(config: ModelConfig) -> torch.Tensor:
        return rope_tables(config, 1)[0]  # the cosine of position 0 times the attention factor

    return all(torch.allclose(read(ours), read(theirs), rtol=1e-5, atol=0) for read in (frequencies, factor))
