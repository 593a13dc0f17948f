"""The target's weights that drafters share, as plain tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from specengine.hub.huggingface import resolve_model
from specengine.models.checkpoint import open_checkpoint
from specengine.train.objectives.base import Frozen


def load_frozen(model: str | Path, vocabulary: torch.Tensor | None, device: torch.device) -> Frozen:
    """Embedding and head of a target, the latter for a vocabulary int64 [V'] (None: all)."""
    checkpoint = open_checkpoint(resolve_model(model))

    def read(name: str) -> torch.Tensor:
        return checkpoint.read(name).float().to(device)

    embedding = read("model.embed_tokens.weight")
    head = embedding if checkpoint.config.tie_embeddings else read("lm_head.weight")
    if vocabulary is not None:
        vocabulary = vocabulary.to(device)
        head = head[vocabulary]
    return Frozen(checkpoint.config, embedding, head, vocabulary, read)
