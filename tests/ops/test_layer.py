"""rms_norm, silu_mul, clamped_swiglu and rope_cache against their references."""

from functools import partial

import pytest
import torch

from specengine import _C
from specengine.ops.layer import (
    clamped_swiglu,
    clamped_swiglu_reference,
    rms_norm,
    rms_norm_reference,
    rope_cache,
    rope_cache_reference,
    silu_mul,
    silu_mul_reference,
)
from specengine.ops.linear import quantise_rows
from tests.ops.cases import (
    CACHE_DTYPES,
    HEAD_DIMS,
    HEADS,
    PREFIX_LENGTHS,
    chain,
    comb,
    depths_of,
    make_cache,
    randn,
    random_tree,
    star,
)

pytestmark = pytest.mark.usefixtures("instruction_set")

EPS = 1e-5


def rope_tables(positions: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(positions)[:, None] / 100.0 ** (torch.arange(dim // 2) / (dim // 2))
    return angle.cos().contiguous(), angle.sin().contiguous()


def run_rope(op, trees, lengths, heads, kv_heads, dim, dtype, *, norm=True, qkv=None):
    """(q, k_cache, v_cache) after op."""
    cache = make_cache(trees, lengths, kv_heads, dim, dtype)
    rows = int(cache.row_start[-1])
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, seed=3) if qkv is None else qkv
    sizes = (heads * dim, kv_heads * dim) if norm == "whole" else (dim, dim)
    norms = [randn(size, seed=4 + i) if norm else None for i, size in enumerate(sizes)]
    q = torch.full((rows, heads, dim), torch.nan)
    op(qkv, *rope_tables(600, dim), *norms, depths_of(trees), cache.view(), q, EPS)
    return q, cache.k, cache.v


def check_rope(trees, lengths, heads, kv_heads, dim, dtype, norm=True):
    args = (trees, lengths, heads, kv_heads, dim, dtype)
    (q, k, v), expected = run_rope(rope_cache, *args, norm=norm), run_rope(rope_cache_reference, *args, norm=norm)
    # A key may fall on the other side of a rounding boundary; everything not written must be untouched (NaN).
    precision = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    tolerance = {"rtol": precision, "atol": precision}
    torch.testing.assert_close(q, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k, expected[1], equal_nan=True, **tolerance)
    torch.testing.assert_close(v, expected[2], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 40])
@pytest.mark.parametrize("columns", [1, 7, 8, 20, 576])
@pytest.mark.parametrize("with_delta", [False, True])
def test_rms_norm_matches_its_reference(rows, columns, with_delta):
    weight, delta = randn(columns, seed=2), randn(rows, columns, seed=3) if with_delta else None
    residual = randn(rows, columns)
    expected_residual, out, expected = residual.clone(), torch.empty(rows, columns), torch.empty(rows, columns)
    rms_norm(residual, delta, weight, out, EPS)
    rms_norm_reference(expected_residual, delta, weight, expected, EPS)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_takes_rows_without_columns():
    rms_norm(torch.empty(2, 0), None, torch.empty(0), torch.empty(2, 0), EPS)


def test_rms_norm_keeps_the_residual_and_takes_weights_in_turn():
    residual, delta, weights = randn(5, 8), randn(5, 8, seed=3), randn(2, 8, seed=2)
    kept, out, rows = torch.full((5, 3, 8), 7.0), torch.empty(5, 8), residual.clone()
    rms_norm(rows, delta, weights.flatten(), out, EPS, (kept, 1))
    assert torch.equal(kept[:, 1], residual + delta) and kept[:, ::2].eq(7).all()
    for row in range(5):
        alone, own = residual[row : row + 1].clone(), torch.empty(1, 8)
        rms_norm(alone, delta[row : row + 1], weights[row % 2].clone(), own, EPS)
        assert torch.equal(out[row], own[0])


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 40])
@pytest.mark.parametrize("columns", [1, 7, 8, 20, 1536])
def test_silu_mul_matches_its_reference(rows, columns):
    gate_up, out, expected = 4 * randn(rows, 2 * columns), torch.empty(rows, columns), torch.empty(rows, columns)
    silu_mul(gate_up, out)
    silu_mul_reference(gate_up, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 7, 40])
@pytest.mark.parametrize("columns", [1, 7, 8, 20])
def test_clamped_swiglu_matches_its_reference(rows, columns):
    gate_up, out, expected = 4 * randn(rows, 2 * columns), torch.empty(rows, columns), torch.empty(rows, columns)
    for limit, alpha in ((7.0, 1.702), (0.5, 1.0)):
        clamped_swiglu(gate_up, out, limit, alpha)
        clamped_swiglu_reference(gate_up, expected, limit, alpha)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_clamped_swiglu_limits_gates_above_and_the_other_factor_on_both_sides():
    gate, up = torch.tensor([8.0, 7.0, -8.0, -3e38, 1.0, 1.0]), torch.tensor([2.0, 2.0, 2.0, 2.0, 9.0, -9.0])
    out = torch.empty(1, 6)
    clamped_swiglu(torch.cat([gate, up])[None].contiguous(), out, 7.0, 1.702)
    sigmoid = (1.702 * torch.tensor([7.0, 7.0, -8.0, -3e38, 1.0, 1.0])).sigmoid()
    torch.testing.assert_close(out[0], torch.tensor([21.0, 21.0, -24.0, 0.0, 8.0, -6.0]) * sigmoid)
    broken = torch.full((1, 12), torch.nan)
    clamped_swiglu(broken, out, 7.0, 1.702)
    assert out.isnan().all()


def test_silu_mul_holds_over_the_whole_range_of_gates():
    gate = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([0.0, -0.0, 1e-30, -87.3, 88.0, 3e38, -3e38])])
    out, expected = torch.empty(1, len(gate)), torch.empty(1, len(gate))
    gate_up = torch.cat([gate, torch.ones(len(gate))])[None].contiguous()
    silu_mul(gate_up, out)
    silu_mul_reference(gate_up, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 9, 40])
@pytest.mark.parametrize("columns", [1, 20, 32, 33, 576])
def test_rows_for_a_quantised_weight_are_the_quantised_rows_of_the_float_output(rows, columns):
    weight, delta, residual = randn(columns, seed=2), randn(rows, columns, seed=3), randn(rows, columns)
    gate_up = 4 * randn(rows, 2 * columns)
    if rows > 7:
        delta[7, 0], gate_up[7, columns - 1] = torch.nan, torch.inf
    normed, gated = torch.empty(rows, columns), torch.empty(rows, columns)
    rms_norm(residual.clone(), delta, weight, normed, EPS)
    clamped = torch.empty(rows, columns)
    silu_mul(gate_up, gated)
    clamped_swiglu(gate_up, clamped, 7.0, 1.702)
    out, again = quantise_rows(normed), residual.clone()
    out.fill_(77)
    rms_norm(again, delta, weight, out, EPS)
    assert torch.equal(out, quantise_rows(normed))
    torch.testing.assert_close(again, residual + delta, rtol=0, atol=0, equal_nan=True)
    out.fill_(77)
    silu_mul(gate_up, out)
    assert torch.equal(out, quantise_rows(gated))
    out.fill_(77)
    clamped_swiglu(gate_up, out, 7.0, 1.702)
    assert torch.equal(out, quantise_rows(clamped))


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads", [*HEADS, (2, 0)])
def test_rope_cache_matches_its_reference_for_every_head_grouping(heads, kv_heads, dtype):
    check_rope([comb(20), chain(3), star(9)], [70, 0, 62], heads, kv_heads, 16, dtype)


@pytest.mark.parametrize("dim", [2, *HEAD_DIMS])
@pytest.mark.parametrize("norm", [False, True, "whole"])
def test_rope_cache_matches_its_reference_for_every_head_dim(dim, norm):
    check_rope([random_tree(12), chain(5)], [61, 130], 4, 2, dim, torch.float32, norm)


@pytest.mark.parametrize("length", PREFIX_LENGTHS)
def test_rope_cache_writes_the_right_slots_at_page_edges(length):
    check_rope([random_tree(70, seed=length)], [length], 2, 1, 8, torch.bfloat16)


def test_a_norm_of_a_whole_row_sees_every_head():
    trees, lengths = [random_tree(12), chain(5)], [61, 130]
    qkv = randn(17, 6 * 16, seed=3)
    changed = qkv.clone()
    changed[:, 3 * 16] += 9  # of the last query head
    for norm in (True, "whole"):
        run = partial(run_rope, rope_cache, trees, lengths, 4, 1, 16, torch.float32, norm=norm)
        before, after = run(qkv=qkv)[0], run(qkv=changed)[0]
        assert torch.equal(before[:, 0], after[:, 0]) == (norm is True)


def test_rope_cache_takes_a_long_chain_as_prefill_does():
    check_rope([chain(300), chain(257)], [0, 64], 2, 1, 8, torch.float32)


def test_ops_accept_an_empty_batch():
    q, k, v = run_rope(rope_cache, [], [], 4, 2, 8, torch.float32)
    assert q.shape == (0, 4, 8) and k.isnan().all() and v.isnan().all()


def test_rows_have_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads():
    residual, weight, gate_up = randn(40, 53), randn(53, seed=2), randn(40, 2 * 53, seed=3)

    def both(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        x, gates = residual[rows].clone(), gate_up[rows].clone()
        normed, gated = torch.empty_like(x), torch.empty_like(x)
        rms_norm(x, x.clone(), weight, normed, EPS)
        silu_mul(gates, gated)
        return normed, gated

    _C.set_num_threads(1)
    alone = [both(slice(m, m + 1)) for m in range(40)]
    for threads in (1, 2, 3):
        _C.set_num_threads(threads)
        for got, parts in zip(both(slice(0, 40)), zip(*alone, strict=True), strict=True):
            assert torch.equal(got, torch.cat(parts))


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_a_node_is_rotated_to_the_same_bits_as_its_token_in_plain_decoding(dtype):
    tree, length, dim = random_tree(33, seed=6), 50, 20
    qkv = randn(33, (4 + 2 * 2) * dim, seed=7)
    q, _, _ = run_rope(rope_cache, [tree], [length], 4, 2, dim, dtype, qkv=qkv)
    depths = depths_of([tree]).tolist()
    lengths = [length + depth for depth in depths]
    decoded, _, _ = run_rope(rope_cache, [[-1]] * 33, lengths, 4, 2, dim, dtype, qkv=qkv)
    assert torch.equal(q, decoded)


def test_nan_reaches_the_output_of_its_row_and_no_other():
    residual, delta, weight, out = randn(9, 20), randn(9, 20, seed=2), randn(20, seed=3), torch.empty(9, 20)
    delta[4, 17] = torch.nan
    rms_norm(residual, delta, weight, out, EPS)
    assert out[4].isnan().all() and out.isnan().sum() == 20
    gate_up, gated = randn(9, 40), torch.empty(9, 20)
    gate_up[2, 1], gate_up[2, 19], gate_up[5, 20 + 8] = torch.nan, torch.nan, torch.nan
    silu_mul(gate_up, gated)
    assert [tuple(x) for x in gated.isnan().nonzero().tolist()] == [(2, 1), (2, 19), (5, 8)]
