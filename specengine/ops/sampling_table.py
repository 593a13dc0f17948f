"""The sampling parameters and the token histories of a batch, as the ops that sample take them.

Shapes: B requests, T columns of the history, E entries of all logit biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch

from specengine import _C
from specengine.draft_trees.tree import TreeBatch
from specengine.types import SamplingParams


@dataclass(frozen=True)
class SamplingTable:
    """The sampling parameters of a batch as tensors, one entry per request; SamplingParams explains them."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    seed: torch.Tensor
    bias_start: torch.Tensor
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams], seeds: Sequence[int]) -> SamplingTable:
        """The table of these parameters. seeds: one per request; sample i of a request has seed + i."""
        biases = [dict(p.logit_bias or {}) for p in params]

        def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype)

        return SamplingTable(
            temperature=column("temperature"),
            top_k=column("top_k", torch.int32),
            top_p=column("top_p"),
            min_p=column("min_p"),
            repetition_penalty=column("repetition_penalty"),
            presence_penalty=column("presence_penalty"),
            frequency_penalty=column("frequency_penalty"),
            seed=torch.tensor(list(seeds), dtype=torch.int64),
            bias_start=torch.tensor([0, *(len(b) for b in biases)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            bias_tokens=torch.tensor([t for b in biases for t in b], dtype=torch.int32),
            bias_values=torch.tensor([v for b in biases for v in b.values()], dtype=torch.float32),
        )

    def to(self, device: torch.device) -> SamplingTable:
        return SamplingTable(*(column.to(device) for column in self.native))

    @cached_property
    def native(self) -> _C.SamplingTable:
        """The tensors as the ops take them."""
        return _C.SamplingTable(*(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True)
class TokenHistory:
    """Committed tokens. tokens: int32 [B, T].  length: int32 [B], root included.  prompt_length: int32 [B]."""

    tokens: torch.Tensor
    length: torch.Tensor
    prompt_length: torch.Tensor

    @staticmethod
    def of(texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], columns: int) -> TokenHistory:
        """The history of these texts, which begin with their prompts; columns: room for so many tokens."""
        tokens = np.zeros((len(texts), columns), dtype=np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        return TokenHistory(
            tokens=torch.from_numpy(tokens),
            length=torch.tensor([len(text) for text in texts], dtype=torch.int32),
            prompt_length=torch.tensor(list(prompt_lengths), dtype=torch.int32),
        )

    @property
    def last(self) -> torch.Tensor:
        """The last token of every text, int32 [B, 1]."""
        return self.tokens.gather(1, self.length[:, None].long() - 1)

    def to(self, device: torch.device) -> TokenHistory:
        return TokenHistory(*(column.to(device) for column in self.native))

    @cached_property
    def native(self) -> _C.TokenHistory:
        """The tensors as the ops take them."""
        return _C.TokenHistory(*(getattr(self, f.name) for f in fields(self)))


def sampled_trees(tree: TreeBatch, params: SamplingTable, history: TokenHistory) -> _C.SampledTrees:
    """The trees of a batch with everything that shapes the distributions of their nodes."""
    return _C.SampledTrees(tree.tokens, tree.parents, tree.row_start, params.native, history.native)
