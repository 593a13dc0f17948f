"""Fused ops give the bits of the two ops, whatever the order of blocks."""

from functools import partial

import pytest
import torch

from specengine._C import RotatedRows
from specengine.ops import cuda_ops
from specengine.ops.autotune import VARIANTS
from specengine.ops.layer import rms_norm, rope_cache, silu_mul
from specengine.ops.layerwise import fused as fused_module
from specengine.ops.layerwise.fused import FusedOps
from specengine.ops.linear import LIBRARY, Projection, linear_cuda
from specengine.ops.tree_attention import arrival_counters
from specengine.ops.weight import FLOAT_FORMATS, Weight, gather_rows
from tests.ops.cases import chain, comb, depths_of, make_cache, randn, view_on

EPS = 1e-5
every_dtype = pytest.mark.parametrize("dtype", FLOAT_FORMATS.values(), ids=FLOAT_FORMATS)
every_variant = pytest.mark.parametrize("variant", (0, *VARIANTS.values()))


class Always:
    """Choices that are always the same."""

    def __init__(self, way: int) -> None:
        self.way = way

    def choose(self, weight: torch.Tensor, rows: int) -> int:
        return self.way

    choose_fused = choose


def layer_of(backend, rows, columns, dtype, *, bias=True, seed=3) -> Projection:
    formats = {value: name for name, value in FLOAT_FORMATS.items()}
    data = backend.put(randn(rows, columns, seed=seed).to(dtype))
    return Projection((Weight(data, rows, formats[dtype]),), backend.put(randn(rows, seed=2)) if bias else None)


def rows_of(backend, rows, columns, dtype) -> torch.Tensor:
    return backend.put(randn(rows, columns, seed=1).to(dtype))


def fused_of(backend, way: int) -> tuple[FusedOps, torch.Tensor]:
    arrived = arrival_counters(backend.device)
    return FusedOps(Always(way), arrived), arrived


@every_dtype
def test_a_norm_behind_the_embedding(cuda_backend, dtype):
    for columns, out_dtype in ((72, dtype), (1544, torch.float32)):
        table = layer_of(cuda_backend, 20, columns, dtype).weights[0]
        ids = cuda_backend.put(torch.tensor([3, -1, 19, 20], dtype=torch.int32))
        norm = cuda_backend.put(randn(columns, seed=8))
        residual, expected_residual = (torch.full((4, columns), torch.nan, device=ids.device) for _ in range(2))
        out, expected = (torch.empty(4, columns, dtype=out_dtype, device=ids.device) for _ in range(2))
        kept = torch.zeros(4, 3, columns, device=ids.device)
        assert fused_of(cuda_backend, 0)[0].gather_norm(table, ids, residual, norm, out, EPS, (kept, 1))
        gather_rows(table, ids, expected_residual)
        rms_norm(expected_residual, None, norm, expected, EPS)
        assert torch.equal(residual, expected_residual) and torch.equal(out, expected)
        assert torch.equal(kept[:, 1], residual) and not kept[:, ::2].any()


@every_dtype
@every_variant
def test_a_gate_behind_its_product(cuda_backend, dtype, variant):
    for m, half, columns, bias in ((1, 40, 136, True), (8, 37, 72, False), (5, 8, 8, True), (3, 130, 576, True)):
        layer = layer_of(cuda_backend, 2 * half, columns, dtype, bias=bias)
        x, out = rows_of(cuda_backend, m, columns, dtype), cuda_backend.put(torch.full((m, half), -77.0, dtype=dtype))
        assert fused_of(cuda_backend, variant)[0].silu(x, layer, out)
        expected = torch.empty_like(out)
        silu_mul(linear_cuda(x, layer, Always(variant)), expected)
        assert torch.equal(out, expected)


@every_dtype
@every_variant
@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_a_norm_behind_its_product(cuda_backend, dtype, variant, schedule):
    if cuda_backend.name == "sim":
        fused_module._C.set_schedule(schedule)
    sizes = ((1, 64, 136, True), (8, 100, 72, False), (5, 4, 8, True), (2, 1540, 64, True))
    for (m, n, columns, bias), out_dtype in zip(sizes, (dtype, torch.float32) * 2, strict=True):
        layer, norm = layer_of(cuda_backend, n, columns, dtype, bias=bias), cuda_backend.put(randn(n, seed=8))
        x, start = rows_of(cuda_backend, m, columns, dtype), randn(m, n, seed=9)
        fused, arrived = fused_of(cuda_backend, variant)
        residual, expected_residual = cuda_backend.put(start.clone()), cuda_backend.put(start.clone())
        out, expected = (torch.empty(m, n, dtype=out_dtype, device=x.device) for _ in range(2))
        kept = torch.zeros(m, 2, n, device=x.device)
        for place in range(2):  # counters are zeros again
            assert fused.norm(x, layer, residual, norm, out, EPS, (kept, place))
            rms_norm(expected_residual, linear_cuda(x, layer, Always(variant)), norm, expected, EPS)
            assert torch.equal(residual, expected_residual) and torch.equal(out, expected)
            assert torch.equal(kept[:, place], residual)
        assert not torch.equal(kept[:, 0], kept[:, 1]) and not arrived.any()


@every_variant
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gates"])
@pytest.mark.parametrize("head_norms", [False, True], ids=["bare", "norms"])
def test_a_rotation_behind_its_product(cuda_backend, variant, gated, head_norms):
    rope_is_the_same_fused(cuda_backend, variant, gated, head_norms, [comb(3), comb(2)], [70, 5])


def rope_is_the_same_fused(cuda_backend, variant, gated, head_norms, trees, lengths):
    heads, kv_heads, dim, columns, dtype = 3, 2, 64, 72, torch.bfloat16
    cache = make_cache(trees, lengths, kv_heads, dim, dtype).view()
    depths = depths_of(trees)
    m = len(depths)
    layer = layer_of(cuda_backend, ((2 if gated else 1) * heads + 2 * kv_heads) * dim, columns, dtype)
    x, angles = rows_of(cuda_backend, m, columns, dtype), randn(100, dim // 2, seed=4)
    norms = [cuda_backend.put(randn(dim, seed=seed)) if head_norms else None for seed in (5, 6)]
    turned = RotatedRows(
        cuda_backend.put(angles.cos()), cuda_backend.put(angles.sin()), *norms, cuda_backend.put(depths)
    )
    fused, arrived = fused_of(cuda_backend, variant)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return cuda_backend.put(tensor.clone())

    mine, other = (view_on(copied, cache) for _ in range(2))
    q, expected_q = (torch.empty(m, heads, dim, device=x.device) for _ in range(2))
    qkv = torch.empty(m, layer.rows, device=x.device)
    assert fused.rope(x, layer, turned, mine, q, EPS, qkv)
    expected = linear_cuda(x, layer, Always(variant))
    rope_cache(expected, *turned[:4], turned.depths, other, expected_q, EPS)
    assert torch.equal(qkv, expected) and torch.equal(q, expected_q)
    for one, two in zip(mine[:2], other[:2], strict=True):
        assert torch.equal(one.view(torch.int16), two.view(torch.int16))  # unused slots hold NaN
    assert not arrived.any()


def test_a_head_of_many_rows(cuda_backend):
    """Eight rows of one chain, of a head dim that variant 0 divides."""
    rope_is_the_same_fused(cuda_backend, 0, gated=False, head_norms=True, trees=[chain(8)], lengths=[60])


def test_what_is_left_to_two_launches(cuda_backend):
    layer, x = layer_of(cuda_backend, 40, 72, torch.bfloat16), rows_of(cuda_backend, 8, 72, torch.bfloat16)
    out = torch.empty(8, 20, dtype=torch.bfloat16, device=x.device)
    silu = partial(fused_of(cuda_backend, 0)[0].silu, x, layer, out)
    assert silu()
    many, two = rows_of(cuda_backend, 9, 72, torch.bfloat16), Projection(layer.weights * 2, None)
    fused = fused_of(cuda_backend, 0)[0]
    assert not fused.silu(many, layer, torch.empty(9, 20, dtype=torch.bfloat16, device=x.device))
    assert (
        not fused.silu(x, two, out) and not fused.silu(x.float(), layer, out) and not fused.silu(x, layer, out.float())
    )
    assert not fused_of(cuda_backend, LIBRARY)[0].silu(x, layer, out)


def test_the_environment_switches_fused_ops_off(cuda_backend, monkeypatch):
    assert cuda_ops(cuda_backend.device).layer.fused is not None
    monkeypatch.setenv("SPECENGINE_FUSE", "0")
    assert cuda_ops(cuda_backend.device).layer.fused is None


def test_bad_arguments_are_refused_by_name(cuda_backend):
    core = fused_module._C
    weight, x = randn(40, 72).to(cuda_backend.device), randn(8, 72).to(cuda_backend.device)
    residual, norm, out = (torch.zeros(*shape, device=x.device) for shape in ((8, 40), (40,), (8, 40)))
    counters = torch.zeros(1, dtype=torch.int32, device=x.device)
    good = {"x": x, "weight": weight, "bias": None, "residual": residual, "norm": norm, "out": out}
    kept = torch.zeros(8, 3, 40, device=x.device)
    good |= {"kept": kept, "arrived": counters, "eps": EPS, "place": 0, "variant": 0}
    core.linear_norm(**good)
    for changes, message in (
        ({"x": torch.zeros(9, 72, device=x.device)}, "x: expected at most 8 rows, got 9"),
        ({"arrived": counters[:0]}, "arrived: expected at least 1 counter, got 0"),
        ({"out": out.half()}, "out: expected dtype float32"),
        ({"norm": norm[:39]}, "norm: "),
        ({"kept": kept[:, :, :39].contiguous()}, "kept: "),
        ({"place": 3}, "place: expected 0 to 2, got 3"),
        ({"variant": 9}, "variant: expected 0 to "),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            core.linear_norm(**{**good, **changes})
    with pytest.raises(ValueError, match=r"^weight: expected an even number of rows, got 39$"):
        core.linear_silu(x, weight[:39].clone(), None, out[:, :19].clone(), 0)
