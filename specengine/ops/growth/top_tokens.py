"""The likeliest tokens of rows of logits."""

from __future__ import annotations

import torch

from specengine import _C


def vocabulary_parts(rows: int, vocab: int, children: int, arrived: torch.Tensor) -> _C.VocabularyParts:
    """Returns workspace for the likeliest children of rows. arrived: int32 [requests or more], zeros, on the device."""
    sizes = (rows, -(-vocab // _C.VOCABULARY_PART))
    best = torch.empty(*sizes, children, dtype=torch.int32, device=arrived.device)
    sums = torch.empty(sizes, device=arrived.device)
    return _C.VocabularyParts(best, torch.empty_like(best, dtype=torch.float32), sums, arrived)


def top_tokens(logits: torch.Tensor, children: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the likeliest tokens int32 [R, k], of equals the lower first, and their log-probabilities float32 [R, k].

    logits: float32 [R, Vd].  children: k.
    Raises ValueError for sizes that do not fit and, on the CPU, for logits that are no distribution (NaN, say); on CUDA
    such a row has tokens of -1 and log-probabilities of 0.
    """
    rows, vocab = logits.shape
    arrived = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, children, dtype=torch.int32, device=logits.device)
    log_probs = torch.empty(rows, children, device=logits.device)
    _C.top_tokens(logits, vocabulary_parts(rows, vocab, children, arrived), tokens, log_probs)
    return tokens, log_probs
