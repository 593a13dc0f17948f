"""e4m3 numbers with a scale per block of 128 by 128, in the layout of Qwen's and DeepSeek's FP8 checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 128
_LARGEST = 448.0  # of e4m3


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises rows [R, K]; blocks start at the first row and column, the last ones may be partial.

    Returns float8_e4m3fn [R, K] and the multipliers, bfloat16 [ceil(R / 128), ceil(K / 128)].
    """
    count, columns = rows.shape
    padded = F.pad(rows.float(), (0, -columns % BLOCK, 0, -count % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / _LARGEST).bfloat16().float()
    scales[scales == 0] = 1.0
    codes = (blocks / scales[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:count, :columns].contiguous(), scales.bfloat16()
