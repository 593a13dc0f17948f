"""The roots of a batch on the device."""

from __future__ import annotations

import torch

from specengine.ops.sampling_table import TokenHistory


def root_tokens(history: TokenHistory) -> torch.Tensor:
    """Returns the last committed token of every request, int32 [B, 1]."""
    return history.tokens.gather(1, history.length[:, None].long() - 1)
