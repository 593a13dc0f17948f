"""Harnesses: folders of quantised weights. Each module of a file has a format of its own."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors.torch import save

from specengine.models.checkpoint import open_checkpoint
from tests.fuzz import seeds
from tests.fuzz.contract import Harness
from tests.fuzz.mutations import damaged_json, damaged_safetensors
from tests.models.quantised.packing import awq, gptq, grouped, words
from tests.models.quantised.packing_fp4 import bitsandbytes4, mxfp4, nvfp4

JSON = 64  # bytes of Python's objects per byte of text
Tensors = dict[str, torch.Tensor]


def _fp8(weight: torch.Tensor) -> Tensors:
    return {
        "weight": weight.to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.ones(2, 1),
        "input_scale": torch.ones(()),
    }


def _bytes8(weight: torch.Tensor) -> Tensors:
    return {
        "weight": (weight * 99).to(torch.int8),
        "SCB": torch.ones(len(weight)),
        "weight_format": torch.tensor(0).byte(),
    }


def _packed(weight: torch.Tensor, bits: int) -> Tensors:
    codes, zeros, scales, _ = grouped(weight, bits, 16)
    named = {"weight_packed": words(codes, bits), "weight_zero_point": words(zeros.T, bits).T.contiguous()}
    return {**named, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def _zeros8(weight: torch.Tensor) -> Tensors:
    zeros = torch.ones(len(weight), 1, dtype=torch.int8)
    return {
        "weight": (weight * 99).to(torch.int8),
        "weight_scale": torch.ones(len(weight), 1),
        "weight_zero_point": zeros,
    }


def _mxfp8(weight: torch.Tensor) -> Tensors:
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.full((len(weight), 1), 120).byte()}


def _mxfp6(weight: torch.Tensor) -> Tensors:
    scales = torch.full((len(weight), 1), 120).byte()
    return {"weight_packed": torch.ones(len(weight), 24).byte(), "weight_scale": scales}


def _nvfp4(weight: torch.Tensor) -> Tensors:
    tensors, _ = nvfp4(weight)
    tensors = {**tensors, "weight_packed": tensors["weight"], "weight_global_scale": torch.ones(1)}
    return {end: tensor for end, tensor in tensors.items() if end not in ("weight", "weight_scale_2")}


def _act_order(weight: torch.Tensor) -> Tensors:
    return gptq(weight, 4, 16, order=torch.arange(weight.shape[1]).flip(0))[0]


_INT = {"type": "int", "group_size": 16, "symmetric": False}
_GROUPS = {
    "a": {"targets": ["Linear"], "weights": {**_INT, "num_bits": 4}},
    "b": {"targets": ["re:.*k_proj"], "weights": {**_INT, "num_bits": 3}},
    "c": {"targets": ["re:.*[vo]_proj"], "weights": {"num_bits": 8, "symmetric": False, "strategy": "channel"}},
    "d": {"targets": ["model.layers.0.mlp.up_proj"], "weights": {"num_bits": 6, "type": "float", "group_size": 32}},
}
# of each file: its settings, and how each linear layer of it is packed
_FILES = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "weight_block_size": [16, 32]},
        {
            "q_proj": _act_order,
            "k_proj": lambda weight: mxfp4(weight)[0],
            "v_proj": lambda weight: nvfp4(weight)[0],
            "o_proj": lambda weight: bitsandbytes4(64, nested=True)(weight)[0],
            "gate_proj": _fp8,
            "up_proj": _bytes8,
            "down_proj": lambda weight: gptq(weight, 4, 16)[0],
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        dict.fromkeys(("q_proj", "k_proj", "down_proj"), lambda weight: awq(weight, 16)[0]),
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": _GROUPS, "ignore": ["x"]},
        {
            "q_proj": partial(_packed, bits=4),
            "k_proj": partial(_packed, bits=3),
            "v_proj": partial(_packed, bits=8),
            "o_proj": _zeros8,
            "gate_proj": _mxfp8,
            "up_proj": _mxfp6,
            "down_proj": _nvfp4,
        },
    ),
}


@lru_cache
def _tensors(kind: str) -> bytes:
    stored = dict(seeds.state())
    for name, pack in _FILES[kind][1].items():
        part = "self_attn" if name[1] == "_" else "mlp"
        module = f"model.layers.0.{part}.{name}"
        packed = pack(stored.pop(f"{module}.weight"))
        stored |= {f"{module}.{end}": tensor.contiguous().clone() for end, tensor in packed.items()}
    return save(stored)


def _config(kind: str) -> bytes:
    return json.dumps({**seeds.CONFIG, "quantization_config": _FILES[kind][0]}).encode()


def _read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name, info in checkpoint.tensors.items():
        rows = checkpoint.read_rows(name, 0, min(2, info.shape[0]))
        assert rows.shape[1:] == info.shape[1:]
        if info.coding is not None:
            coded = checkpoint.read_coded(name, 0, len(rows)).values()
            order = checkpoint.column_order(name)
            assert torch.equal(coded, rows if order is None else rows[:, order])


def _damaged_tensors(path: Path, kind: str) -> None:
    (path.parent / "config.json").write_bytes(_config(kind))
    _read(path.parent)


def _damaged_config(path: Path) -> None:
    text = path.read_bytes()
    kind = "awq" if b'"awq"' in text else "compressed-tensors" if b"compressed-tensors" in text else "gptq"
    (path.parent / "model.safetensors").write_bytes(_tensors(kind))
    _read(path.parent)


HARNESSES = (
    *(
        Harness(
            f"{kind} weights",
            lambda kind=kind: [_tensors(kind)],
            partial(_damaged_tensors, kind=kind),
            ("quantised",),
            f"quantised-{kind}/model.safetensors",
            damaged_safetensors,
            JSON,
        )
        for kind in _FILES
    ),
    Harness(
        "quantization config",
        lambda: [_config(kind) for kind in _FILES],
        _damaged_config,
        ("quantised",),
        "quantised-config/config.json",
        damaged_json,
        JSON,
    ),
)
