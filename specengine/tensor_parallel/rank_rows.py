"""The rows of a pass in a rank from 1 on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class RankRows:
    """The rows of a pass; see ops.decoder.Rows.

    tokens: only their number counts, because the pass reads embedded tokens.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor | None
