"""Linear layers, measured: on CUDA every variant of the kernel, on the CPU every format of packed weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import torch

from specengine import ops
from specengine._C import LINEAR_VARIANTS
from specengine.bench.kernels.case import Case, Kernels, Shapes, each, writing
from specengine.bench.kernels.timers import Call
from specengine.ops.linear import linear
from specengine.ops.weight import Projection, empty_weight, pack_linear

PACKED = {"float32": "float32", "int8": "q8", "int4": "q4_min"}


def linear_cases(s: Shapes, device: torch.device, kernels: Kernels) -> Iterator[Case]:
    """Every layer of a model by rows."""
    for name in s.linears:
        for rows in s.rows:
            if kernels.packed:
                yield from (_packed(s, name, rows, dtype) for dtype in PACKED)
            else:
                yield _by_variant(s, device, name, rows)


def _by_variant(s: Shapes, device: torch.device, name: str, rows: int) -> Case:
    n, c = s.linears[name]
    weight_bytes = 2 * n * c
    weights = torch.randn(s.sets(weight_bytes), n, c, dtype=torch.bfloat16, device=device)
    x = torch.randn(rows, c, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, n, device=device)
    ours = {
        f"{most}x{warps}": [writing(out, ops.linear.multiply, x, weight, None, out, 0, variant) for weight in weights]
        for variant, (most, warps) in enumerate(LINEAR_VARIANTS, start=1)
    }
    torchs = each(lambda weight: torch.mm(x, weight.T), weights)
    return Case("linear", f"{name} {n}x{c}, M={rows}", weight_bytes + rows * (2 * c + 4 * n), ours, torchs)


def _packed(s: Shapes, name: str, rows: int, dtype: str) -> Case:
    n, c = s.linears[name]
    sample = empty_weight(n, c, PACKED[dtype], torch.device("cpu"))
    count, x = s.sets(sample.data.nbytes), torch.randn(rows, c)
    ours: list[Call] = []
    torchs: list[Call] = []
    for _ in range(count):
        values, weight = torch.randn(n, c), empty_weight(n, c, PACKED[dtype], torch.device("cpu"))
        pack_linear(values, weight, 0)
        ours.append(partial(linear, x, Projection((weight,), None)))
        torchs.append(_torch_product(x, values, quantised=weight.quantised))
    nbytes = sample.data.nbytes + rows * (4 * c + 4 * n)
    return Case(f"linear, {dtype}", f"{name} {n}x{c}, M={rows}", nbytes, {"": ours}, torchs)


def _torch_product(x: torch.Tensor, values: torch.Tensor, quantised: bool) -> Call:
    """torch.mm, or its product of rows quantised on the way with weights of 8 bits: of fewer it has none as fast."""
    if not quantised:
        return lambda: torch.mm(x, values.T)
    scales = values.abs().amax(dim=1).double() / 127
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # deprecated, and the fastest there is
        codes = torch.quantize_per_channel(values, scales, torch.zeros(len(values), dtype=torch.long), 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(codes, None)
    return lambda: torch.ops.quantized.linear_dynamic(x, packed)
