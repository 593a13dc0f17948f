"""Rotary scaling between its two spellings: Llama 3's parameters, and GGUF's divisors of each frequency."""

from __future__ import annotations

from dataclasses import replace

import torch

from specengine.models.config import RopeConfig
from specengine.models.rope import static_frequencies

_LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.2, with these parameters
_LLAMA3 = RopeConfig(kind="llama3", original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0)


def divisors_of(rope: RopeConfig, head_dim: int) -> tuple[float, ...]:
    """Returns by what each frequency is divided, [head_dim / 2]; empty where the kind needs no table."""
    if rope.kind != "llama3":
        return rope.freq_divisors
    plain = static_frequencies(replace(rope, kind="default", freq_divisors=()), head_dim)
    return tuple((plain / static_frequencies(rope, head_dim)).tolist())


def llama3_of(rope: RopeConfig, head_dim: int) -> RopeConfig | None:
    """Returns the published parameters of Llama 3 whose divisors are those of `rope`, or None."""
    for factor in _LLAMA3_FACTORS:
        candidate = replace(_LLAMA3, theta=rope.theta, factor=factor)
        ours, theirs = torch.tensor(divisors_of(candidate, head_dim)), torch.tensor(rope.freq_divisors)
        if torch.allclose(ours, theirs, rtol=1e-5, atol=0):
            return candidate
    return None
