"""Packs weights as ModelOpt and bitsandbytes lay out their codes of 4 bits."""

import json

import torch

from specengine.ops.coded.rows import NUMBERS

NF4 = torch.tensor([-1, -0.69, -0.52, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1])


def nearest(numbers, table):
    return (numbers[..., None] - table).abs().argmin(-1)


def e2m1(weight, scales):
    """Packs codes for float32 scales [N, G]. Returns bytes [N, K/2] and values."""
    columns = weight.shape[1]
    wide = scales.repeat_interleave(columns // scales.shape[1], 1)
    codes = nearest(weight / wide, NUMBERS["e2m1"])
    return (codes[:, ::2] | codes[:, 1::2] << 4).byte(), NUMBERS["e2m1"][codes] * wide


def nvfp4(weight):
    tensor_wide = torch.tensor(0.0003)
    scales = (weight.view(len(weight), -1, 16).abs().amax(2) / 6 / tensor_wide).to(torch.float8_e4m3fn)
    packed, values = e2m1(weight, scales.float() * tensor_wide)
    return {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": tensor_wide,
        "input_scale": torch.ones(()),
    }, values


def mxfp4(weight):
    exponents = weight.view(len(weight), -1, 32).abs().amax(2).log2().floor() - 2
    packed, values = e2m1(weight, exponents.exp2())
    return {"weight": packed, "weight_scale": (exponents + 127).byte()}, values


def bitsandbytes4(block=64, nested=False, storage=torch.uint8):
    def pack(weight):
        blocks = weight.view(-1, block)
        peaks = blocks.abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
        tensors = {"weight.quant_map": NF4}
        if nested:
            table = torch.linspace(-1, 1, 256)
            offset = peaks.mean().item()
            padded = torch.nn.functional.pad(peaks - offset, (0, -len(peaks) % 256)).view(-1, 256)
            outer = padded.abs().amax(1)
            codes = nearest(padded / outer[:, None], table)
            peaks = (table[codes] * outer[:, None]).view(-1)[: len(peaks)] + offset
            tensors |= {"weight.absmax": codes.view(-1)[: len(peaks)].byte(), "weight.nested_absmax": outer}
            tensors["weight.nested_quant_map"] = table
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            tensors["weight.absmax"] = peaks
        codes = nearest(blocks / peaks[:, None], NF4)
        flat = codes.view(-1).byte()
        tensors["weight"] = (flat[::2] << 4 | flat[1::2]).view(storage)[:, None]
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()]).byte()
        return tensors, (NF4[codes] * peaks[:, None]).view(weight.shape)

    return pack
