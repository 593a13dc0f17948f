"""Cases of linear layers: every variant of the kernel on CUDA, every format of packed weights on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import torch

from specengine import ops
from specengine._C import LINEAR_VARIANTS
from specengine.bench.kernels.case import Case, call_each, returning
from specengine.bench.kernels.shapes import Kernels, Shapes
from specengine.bench.kernels.timers import Call
from specengine.ops.linear import linear
from specengine.ops.weight import Projection, empty_weight, pack_linear

PACKED = {"float32": "float32", "int8": "q8", "int4": "q4_min"}


def linear_cases(s: Shapes, device: torch.device, kernels: Kernels) -> Iterator[Case]:
    """Yields every linear layer of a model at every number of rows."""
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
        f"{most}x{warps}": [returning(out, ops.linear.multiply, x, weight, None, out, 0, variant) for weight in weights]
        for variant, (most, warps) in enumerate(LINEAR_VARIANTS, start=1)
    }
    torchs = call_each(lambda weight: torch.mm(x, weight.T), weights)
    return Case("linear", f"{name} {n}x{c}, M={rows}", weight_bytes + rows * (2 * c + 4 * n), ours, torchs)


def _packed(s: Shapes, name: str, rows: int, dtype: str) -> Case:
    n, c = s.linears[name]
    sample = empty_weight(n, c, PACKED[dtype], torch.device("cpu"))
    count = s.sets(sample.data.nbytes)
    x = torch.randn(rows, c)
    ours: list[Call] = []
    torchs: list[Call] = []
    for _ in range(count):
        values = torch.randn(n, c)
        weight = empty_weight(n, c, PACKED[dtype], torch.device("cpu"))
        pack_linear(values, weight, 0)
        ours.append(partial(linear, x, Projection((weight,), None)))
        torchs.append(_torch_product(x, values, quantised=weight.quantises_rows))
    nbytes = sample.data.nbytes + rows * (4 * c + 4 * n)
    return Case(f"linear, {dtype}", f"{name} {n}x{c}, M={rows}", nbytes, {"": ours}, torchs)


def _torch_product(x: torch.Tensor, values: torch.Tensor, quantised: bool) -> Call:
    """Returns a call of torch.mm; for quantised weights, of the product with 8-bit weights and dynamic quantisation.

    PyTorch has no faster product with fewer bits.
    """
    if not quantised:
        return lambda: torch.mm(x, values.T)
    scales = values.abs().amax(dim=1).double() / 127
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # deprecated, but the fastest
        codes = torch.quantize_per_channel(values, scales, torch.zeros(len(values), dtype=torch.long), 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(codes, None)
    # 7 bits of a row (reduce_range): products of 8 bits saturate on processors without VNNI.
    return lambda: torch.ops.quantized.linear_dynamic(x, packed, True)
