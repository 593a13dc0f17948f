"""Packs matrices as FP8 folders have them: codes, and a scale for each block."""

import torch

EXTRA = {"input_scale": torch.ones(1), "k_scale": torch.ones(1), "v_scale": torch.ones(())}


def spread(scales, height, width, shape):
    rows = scales.float().repeat_interleave(height, 0)[: shape[0]]
    return rows.repeat_interleave(width, 1)[:, : shape[1]]


def blocks(height, width, end="weight_scale_inv", kind=torch.float32, codes=torch.float8_e4m3fn):
    def pack(weight):
        rows, columns = weight.shape
        scales = (torch.rand(-(-rows // height), -(-columns // width)) * 0.01 + 0.001).to(kind)
        wide = spread(scales, height, width, weight.shape)
        stored = (weight / wide).to(codes)
        return {"weight": stored, end: scales, **EXTRA}, stored.float() * wide

    return pack
