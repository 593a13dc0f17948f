"""What a network offers that reads pairs of hidden state and token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.drafters.hidden_states.pairs import PairRows
from specengine.models.config import ModelConfig
from specengine.models.hidden_states import HiddenStates


class PairNetwork(Protocol):
    """A network that reads pairs. config: of its layers."""

    config: ModelConfig

    def pick(self, hidden_states: HiddenStates) -> torch.Tensor:
        """Returns those of the target's hidden states that it reads, floats [M, ..]."""
        ...

    def picked_shape(self, hidden_state_layers: int) -> tuple[int, ...]:
        """Returns the shape of one position, where the target gives the input of so many layers."""
        ...

    @property
    def kept_dtype(self) -> torch.dtype:
        """In which captured cycles may keep them: the first product's, where nothing else reads them."""
        ...

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        ...

    def cache_pairs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> None:
        """Caches the keys and values of pairs, and computes nothing beyond."""
        ...

    def block_tokens(self, batch: int) -> torch.Tensor | None:
        """Returns int32 [B, S], whose first column a draft sets to the roots; None: it has no blocks."""
        ...


class NativePairNetwork(PairNetwork, Protocol):
    """The same where a native draft reads the pairs."""

    @property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary tables."""
        ...

    def native_rows(self, picked: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        """Returns rows of picked hidden states as a native draft takes them: float32 [R, ..] and rows of these."""
        ...
