"""The weights of the target that drafters share and never change, as plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from specengine.hub.huggingface import resolve_model
from specengine.models.checkpoint import open_checkpoint
from specengine.models.config import ModelConfig


@dataclass(frozen=True)
class TargetWeights:
    """Embedding and head of a target, and its other tensors by name.

    embedding: float32 [V, C].  head: float32 [V', C], the target's rows for the drafter's vocabulary.
    vocabulary: int64 [V'], the target ids of the drafter's vocabulary, ascending; None for all ids.
    read: returns a tensor of the target's checkpoint by its name, float32.
    """

    config: ModelConfig
    embedding: torch.Tensor
    head: torch.Tensor
    vocabulary: torch.Tensor | None
    read: Callable[[str], torch.Tensor]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeds token ids [..] as [.., C]."""
        return functional.embedding(tokens, self.embedding)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Computes logits [.., V'] of normed hidden states [.., C]."""
        return functional.linear(states, self.head.to(states.dtype))

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Maps ids of the drafter's vocabulary to target ids."""
        return draft_ids if self.vocabulary is None else self.vocabulary[draft_ids]

    def draft_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps target ids to ids of the drafter's vocabulary; -1 for tokens outside it."""
        if self.vocabulary is None:
            return tokens
        row = torch.searchsorted(self.vocabulary, tokens).clamp_(max=len(self.vocabulary) - 1)
        return torch.where(self.vocabulary[row] == tokens, row, -1)

    def vocabulary_tensors(self) -> dict[str, torch.Tensor]:
        """Returns `d2t` int64 [V'], target id minus draft id, as published; {} where both vocabularies are the same."""
        if self.vocabulary is None:
            return {}
        return {"d2t": self.vocabulary.cpu() - torch.arange(len(self.vocabulary))}


def load_target_weights(model: str | Path, vocabulary: torch.Tensor | None, device: torch.device) -> TargetWeights:
    """Reads the weights of a target. vocabulary: the head's tokens int64 [V'], ascending; None for all."""
    checkpoint = open_checkpoint(resolve_model(model))

    def read(name: str) -> torch.Tensor:
        return checkpoint.read(name).float().to(device)

    embedding = read("model.embed_tokens.weight")
    head = embedding if checkpoint.config.tie_embeddings else read("lm_head.weight")
    if vocabulary is not None:
        vocabulary = vocabulary.to(device)
        head = head[vocabulary]
    return TargetWeights(checkpoint.config, embedding, head, vocabulary, read)
