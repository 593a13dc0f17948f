"""The rows of a pass in one tensor, so that one broadcast brings them to the other ranks' devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.tensor_parallel.device.messages import DeviceForward
from specengine.tensor_parallel.rank_rows import RankRows


@dataclass(frozen=True)
class PackedRows:
    """Views of one int32 tensor: all that a pass reads beside weights and cache.

    inputs: float32 [M, hidden], embedded tokens.  block_table: int32 [B, pages].  lengths: int32 [B].
    """

    packed: torch.Tensor
    inputs: torch.Tensor
    rows: RankRows
    block_table: torch.Tensor
    lengths: torch.Tensor

    @staticmethod
    def of(message: DeviceForward, hidden: int, packed: torch.Tensor) -> PackedRows:
        """Divides a tensor of packed_size() numbers."""
        m, b = message.rows, message.requests
        sizes = _sizes(message, hidden)
        inputs, depths, row_start, lengths, table, bits = packed.split(sizes)
        ancestors = bits.view(m, message.words) if message.words else None
        return PackedRows(
            packed,
            inputs.view(torch.float32).view(m, hidden),
            RankRows(depths, depths, row_start, ancestors),
            table.view(b, message.pages),
            lengths,
        )


def packed_size(message: DeviceForward, hidden: int) -> int:
    """Returns how many int32 numbers the rows of a pass take."""
    return sum(_sizes(message, hidden))


def pack_rows(
    inputs: torch.Tensor,
    depths: torch.Tensor,
    row_start: torch.Tensor,
    ancestors: torch.Tensor | None,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Packs the rows of a pass, int32 [packed_size()]."""
    bits = [] if ancestors is None else [ancestors.flatten()]
    parts = [inputs.view(torch.int32).flatten(), depths, row_start, lengths, block_table.flatten(), *bits]
    return torch.cat(parts)


def _sizes(message: DeviceForward, hidden: int) -> list[int]:
    m, b = message.rows, message.requests
    return [m * hidden, m, b + 1, b, b * message.pages, m * message.words]
