"""Packed masks of allowed tokens, as verify_tree takes them: bit t % 32 of word t // 32, 1 = allowed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

MASK_BITS = 32  # tokens of a word


def mask_words(vocab: int) -> int:
    """Returns the words of a row of a mask over `vocab` tokens."""
    return -(-vocab // MASK_BITS)


def mask_of(tokens: Iterable[int], vocab: int) -> np.ndarray:
    """Returns the mask that allows these tokens alone, int32 [ceil(V / 32)]."""
    row = np.zeros(mask_words(vocab), dtype=np.uint32)
    for token in tokens:
        row[token // MASK_BITS] |= np.uint32(1 << token % MASK_BITS)
    return row.view(np.int32)


def pack_masks(allowed: torch.Tensor) -> torch.Tensor:
    """Packs rows of flags.  allowed: bool [M, V].  Returns int32 [M, ceil(V / 32)]; bits past the end are 0."""
    rows, vocab = allowed.shape
    bits = torch.zeros(rows, mask_words(vocab) * MASK_BITS, dtype=torch.int64, device=allowed.device)
    bits[:, :vocab] = allowed
    places = torch.arange(MASK_BITS, device=allowed.device)
    words = (bits.view(rows, -1, MASK_BITS) << places).sum(-1)
    return torch.where(words >= 1 << (MASK_BITS - 1), words - (1 << MASK_BITS), words).int()


def unpack_masks(masks: torch.Tensor, vocab: int) -> torch.Tensor:
    """Unpacks rows.  masks: int32 [M, ceil(V / 32)].  Returns bool [M, V], whether a row allows a token."""
    places = torch.arange(MASK_BITS, device=masks.device)
    return (masks.long()[:, :, None] >> places & 1).flatten(1)[:, :vocab].bool()
