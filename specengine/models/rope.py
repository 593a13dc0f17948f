"""Rotary embedding tables for every supported scaling kind, in the arithmetic of transformers.

The convention is the half-split one: component j of a head is rotated with component j + head_dim / 2.
"""

from __future__ import annotations

import math
import threading

import torch

from specengine.models.config import ModelConfig, RopeConfig


def rope_tables(config: ModelConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes cosines and sines of positions 0 to length - 1, each float32 [length, rotated / 2].

    Both include the attention factor of yarn.
    """
    rope = config.rope
    dim = config.rotated
    # float32 throughout, as in transformers: models are trained and compared with exactly these rounded angles,
    # and at position 100,000 the rounding exceeds 1e-3
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    if rope.kind == "dynamic":
        frequencies = _dynamic_frequencies(rope, dim, length, config.max_position)
    else:
        frequencies = static_frequencies(rope, dim)
    if rope.freq_divisors:
        frequencies = frequencies / torch.tensor(rope.freq_divisors)
    angles = positions * frequencies
    scale = attention_scale(rope)
    return angles.cos().mul_(scale), angles.sin_().mul_(scale)


class RopeTables:
    """rope_tables of a model on its device, extended on demand; models of the same positions share them."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._lock = threading.Lock()  # engines that share a model may grow them from several threads
        self.cos_sin = (torch.empty(0), torch.empty(0))  # replaced only by a longer pair
        self.ensure(min(2048, config.max_position))

    def ensure(self, count: int) -> None:
        """Extends the tables to `count` positions."""
        if count <= len(self.cos_sin[0]):
            return
        with self._lock:
            have = len(self.cos_sin[0])
            if count > have:
                cos, sin = rope_tables(self._config, max(count, min(2 * have, self._config.max_position)))
                self.cos_sin = (cos.to(self._device), sin.to(self._device))


def static_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Returns radians per position, float32 [dim / 2], of every kind but dynamic; freq_divisors are not applied."""
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, dim)
    frequencies = 1.0 / _base_powers(rope.theta, dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    return _llama3_frequencies(rope, frequencies) if rope.kind == "llama3" else frequencies


def _base_powers(base: float | torch.Tensor, dim: int) -> torch.Tensor:
    return base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_frequencies(rope: RopeConfig, dim: int, length: int, max_position: int) -> torch.Tensor:
    """Radians per position for each position, float32 [length, dim / 2].

    Position p uses the base of length max(p + 1, max_position). transformers uses the length of the whole text for all
    its positions; a cached key would then depend on how many tokens were verified with it.
    """
    lengths = torch.arange(1, length + 1, dtype=torch.float32).clamp_(min=max_position)[:, None]
    growth = rope.factor * lengths / max_position - (rope.factor - 1)
    # in float64: the vectorised float32 power rounds differently from the scalar one for the remainder, and a
    # position's row must not depend on the length of the table
    base = rope.theta * (growth.double() ** (dim / (dim - 2))).float()
    return 1.0 / _base_powers(base, dim)


def _pretrained_length(rope: RopeConfig) -> int:
    assert rope.original_max_position is not None  # RopeConfig refuses these kinds without it
    return rope.original_max_position


def _llama3_frequencies(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    # share of the unscaled frequency: 0 for long wavelengths, 1 for short ones, a ramp in between
    share = _pretrained_length(rope) / wavelengths - rope.low_freq_factor
    share = (share / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - share) * frequencies / rope.factor + share * frequencies


def _yarn_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        return dim * math.log(_pretrained_length(rope) / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0  # a ramp of width zero would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _base_powers(rope.theta, dim)
    kept = (1 - ramp) * rope.extrapolation_factor  # share of the unscaled frequency; 1 - kept is not ramp to the bit
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def attention_scale(rope: RopeConfig) -> float:
    """Returns what yarn multiplies queries and keys by; 1 for other kinds."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return rope.attn_factor * (scale(rope.mscale) / scale(rope.mscale_all_dim))
    return rope.attn_factor * scale(1.0)
