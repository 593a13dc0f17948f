"""The CUDA kernels of rms_norm, the gates of MLPs and rope_cache against their references in double precision."""

from functools import partial

import pytest
import torch

from specengine._C import KVCacheView
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
from tests.ops.cases import (
    CACHE_DTYPES,
    HEAD_DIMS,
    HEADS,
    PREFIX_LENGTHS,
    chain,
    comb,
    depths_of,
    later_rows,
    make_cache,
    randn,
    random_tree,
    star,
    view_on,
)

EPS = 1e-5
PRECISION = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
POISON = -77.0
LIMITS = ({"limit": 7.0, "alpha": 1.702}, {"limit": 0.5, "alpha": 1.0})  # gpt-oss's, and one that most numbers pass
QUANTISED_REFUSED = r"^out: expected dtype float32 or bfloat16 or float16, got uint8"


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """The relative error of the whole tensor is within its dtype's precision, and nothing is missing."""
    got, limit = got.cpu(), PRECISION[got.dtype]
    assert torch.equal(got.isnan(), expected.isnan())
    error = (got.double() - expected).nan_to_num().norm()
    assert error <= limit * expected.nan_to_num().norm(), f"{error / expected.nan_to_num().norm():.2e}"


def double(arguments):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers one element behind a boundary of 16 bytes."""
    memory = tensor.new_empty(tensor.numel() + 1)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


def normed(backend, residual, delta, weight, dtype, shift=lambda x: x):
    """(residual, out) after rms_norm on the backend."""
    residual, weight = shift(backend.put(residual.clone())), shift(backend.put(weight))
    delta = None if delta is None else shift(backend.put(delta))
    out = shift(backend.put(torch.full(residual.shape, POISON, dtype=dtype)))
    rms_norm(residual, delta, weight, out, EPS)
    return residual.cpu(), out.cpu()


GATES = [  # each with its reference
    (silu_mul, silu_mul_reference),
    *((partial(clamped_swiglu, **each), partial(clamped_swiglu_reference, **each)) for each in LIMITS),
]
every_gate = pytest.mark.parametrize("gate, reference", GATES, ids=["silu_mul", "clamped_swiglu", "a low limit"])


def gated(backend, gate_up, dtype, shift=lambda x: x, gate=silu_mul):
    out = shift(backend.put(torch.full((len(gate_up), gate_up.shape[1] // 2), POISON, dtype=dtype)))
    gate(shift(backend.put(gate_up)), out)
    return out.cpu()


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 7, 8, 20, 130, 576, 1028, 4104])
def test_rms_norm_matches_its_reference(cuda_backend, columns, with_delta, dtype):
    rows = 3
    residual, weight = randn(rows, columns), randn(columns, seed=2)
    delta = randn(rows, columns, seed=3) if with_delta else None
    after, out = normed(cuda_backend, residual, delta, weight, dtype)
    assert torch.equal(after, residual + delta if with_delta else residual)
    expected = torch.empty(rows, columns, dtype=torch.double)
    rms_norm_reference(*double((after, None, weight)), expected, EPS)
    assert_close(out, expected)


@pytest.mark.parametrize("columns", [16384, 16388, 20001])
def test_rms_norm_takes_rows_that_registers_cannot_hold(cuda_backend, columns):
    residual, delta, weight = randn(1, columns), randn(1, columns, seed=3), randn(columns, seed=2)
    after, out = normed(cuda_backend, residual, delta, weight, torch.float32)
    expected = torch.empty(1, columns, dtype=torch.double)
    rms_norm_reference(*double((residual, delta, weight)), expected, EPS)
    assert torch.equal(after, residual + delta)
    assert_close(out, expected)


@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("columns", [7, 20, 4104])
def test_rms_norm_keeps_the_residual_and_takes_weights_in_turn(cuda_backend, columns, with_delta):
    residual, weights = randn(5, columns), randn(2, columns, seed=2)
    delta = cuda_backend.put(randn(5, columns, seed=3)) if with_delta else None
    rows, kept = cuda_backend.put(residual.clone()), cuda_backend.put(torch.full((5, 3, columns), POISON))
    out = torch.empty_like(rows)
    rms_norm(rows, delta, cuda_backend.put(weights.flatten()), out, EPS, (kept, 2))
    assert torch.equal(kept[:, 2], rows) and kept[:, :2].eq(POISON).all()
    for row in range(5):
        own = normed(cuda_backend, rows[row : row + 1].cpu(), None, weights[row % 2], torch.float32)[1]
        assert torch.equal(out[row].cpu(), own[0])


@every_gate
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 7, 8, 20, 1023, 1024, 1028, 1536])
def test_a_gate_matches_its_reference(cuda_backend, columns, dtype, gate, reference):
    gate_up, expected = 4 * randn(3, 2 * columns), torch.empty(3, columns, dtype=torch.double)
    reference(gate_up.double(), expected)
    assert_close(gated(cuda_backend, gate_up, dtype, gate=gate), expected)


@every_gate
def test_a_gate_holds_over_the_whole_range(cuda_backend, gate, reference):
    gates = torch.cat([torch.linspace(-200, 200, 801), torch.tensor([0.0, -0.0, 1e-30, -87.3, 88.0, 3e38, -3e38])])
    ups, expected = torch.linspace(-20, 20, 808), torch.empty(1, 808)
    gate_up = torch.cat([gates, ups])[None]
    reference(gate_up.double(), expected)
    found = gated(cuda_backend, gate_up, torch.float32, gate=gate)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_any_number_of_rows_is_taken(cuda_backend, rows):
    residual, weight, gate_up = randn(rows, 20), randn(20, seed=2), randn(rows, 40)
    expected = torch.empty(rows, 20, dtype=torch.double)
    rms_norm_reference(*double((residual, None, weight)), expected, EPS)
    assert_close(normed(cuda_backend, residual, None, weight, torch.float32)[1], expected)
    for gate, reference in GATES:
        reference(gate_up.double(), expected)
        assert_close(gated(cuda_backend, gate_up, torch.float32, gate=gate), expected)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_rows_have_the_same_bits_alone_in_a_batch_and_at_any_address(cuda_backend, dtype):
    residual, delta, weight, gate_up = randn(9, 52), randn(9, 52, seed=4), randn(52, seed=2), 4 * randn(9, 104, seed=3)

    def run(rows, shift=lambda x: x):
        norms = normed(cuda_backend, residual[rows], delta[rows], weight, dtype, shift)
        return *norms, *(gated(cuda_backend, gate_up[rows], dtype, shift, gate) for gate, _ in GATES)

    batch, alone = run(slice(None)), [run(slice(m, m + 1)) for m in range(9)]
    for got, parts in zip(batch, zip(*alone, strict=True), strict=True):
        assert torch.equal(got, torch.cat(parts))
    for got, same in zip(batch, run(slice(None), shifted), strict=True):
        assert torch.equal(got, same)


def test_nan_reaches_the_output_of_its_row_and_no_other(cuda_backend):
    residual, delta, weight = randn(9, 20), randn(9, 20, seed=2), randn(20, seed=3)
    delta[4, 17] = torch.nan
    _, out = normed(cuda_backend, residual, delta, weight, torch.float32)
    assert out[4].isnan().all() and out.isnan().sum() == 20
    gate_up = randn(9, 40)
    gate_up[2, 1], gate_up[2, 19], gate_up[5, 20 + 8] = torch.nan, torch.nan, torch.nan
    for gate, _ in GATES:
        out = gated(cuda_backend, gate_up, torch.bfloat16, gate=gate)
        assert [tuple(x) for x in out.isnan().nonzero().tolist()] == [(2, 1), (2, 19), (5, 8)]


def test_quantised_rows_are_refused(cuda_backend):
    rows, columns = cuda_backend.put(torch.zeros(2, 1, 44, dtype=torch.uint8)), cuda_backend.put(randn(2, 32))
    with pytest.raises(ValueError, match=QUANTISED_REFUSED):
        rms_norm(columns, None, columns[0], rows, EPS)
    for gate, _ in GATES:
        with pytest.raises(ValueError, match=QUANTISED_REFUSED):
            gate(cuda_backend.put(randn(2, 64)), rows)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_no_positive_number_is_refused(cuda_backend, limit):
    gate_up, out = cuda_backend.put(randn(2, 64)), cuda_backend.put(torch.full((2, 32), POISON))
    with pytest.raises(ValueError, match=r"^limit: expected a positive number"):
        clamped_swiglu(gate_up, out, limit, 1.0)
    assert out.eq(POISON).all()


def rope_tables(positions: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(positions)[:, None] / 100.0 ** (torch.arange(dim // 2) / (dim // 2))
    return angle.cos().contiguous(), angle.sin().contiguous()


def rope_arguments(trees, lengths, heads, kv_heads, dim, dtype, norms=(True, True)):
    """Everything but q, whose slots of the cache are poisoned: the cache's other slots hold NaN or the prefix."""
    cache = make_cache(trees, lengths, kv_heads, dim, dtype)
    rows = int(cache.row_start[-1])
    sizes = {"q": heads * dim, "k": kv_heads * dim}  # of whole rows
    q_norm, k_norm = (
        randn(sizes[side] if norm == "whole" else dim, seed=4 + i) if norm else None
        for i, (side, norm) in enumerate(zip(sizes, norms, strict=True))
    )
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, seed=3)
    positions = int(depths_of(trees).max()) + max(lengths) + 1
    return [qkv, *rope_tables(positions, dim), q_norm, k_norm, depths_of(trees), cache.view()]


def put_copies(backend, arguments):
    *tensors, view = arguments
    there = [None if x is None else backend.put(x.clone()) for x in tensors]
    return [*there, view_on(lambda x: backend.put(x.clone()), view)]


def roped(backend, arguments, heads, dim):
    """(q, k_cache, v_cache) after rope_cache on the backend."""
    there = put_copies(backend, arguments)
    q = backend.put(torch.full((len(arguments[0]), heads, dim), POISON))
    rope_cache(*there, q, EPS)
    return q.cpu(), there[6].k_cache.cpu(), there[6].v_cache.cpu()


def check_rope(backend, arguments, heads, dim):
    q, k, v = roped(backend, arguments, heads, dim)
    expected_q, (*tensors, view) = torch.empty(q.shape, dtype=torch.double), arguments
    expected = KVCacheView(*double(list(view[:-1])), view.first_node)
    rope_cache_reference(*double(tensors), expected, expected_q, EPS)
    assert_close(q, expected_q)
    assert_close(k, expected.k_cache)
    assert torch.equal(v.nan_to_num(POISON), expected.v_cache.to(v.dtype).nan_to_num(POISON))
    return q, k, v


def test_keys_and_values_may_lie_among_other_columns(backend):
    """Those of several layers are made by one product."""
    arguments = rope_arguments([comb(20), chain(3)], [70, 2], 0, 2, 16, torch.float32)
    wide = torch.cat([randn(23, 64, seed=5), arguments[0], randn(23, 64, seed=6)], dim=1)
    *rest, view = put_copies(backend, arguments)
    *others, seen = put_copies(backend, [wide, *arguments[1:]])
    q = backend.put(torch.empty(23, 0, 16))
    rope_cache(*rest, view, q, EPS)
    rope_cache(*others, seen, q, EPS, 64)
    for cache, expected in ((seen.k_cache, view.k_cache), (seen.v_cache, view.v_cache)):
        assert torch.equal(cache.nan_to_num(POISON), expected.nan_to_num(POISON))
    with pytest.raises(ValueError, match=r"^first: 64 columns from 129 on do not fit into 192"):
        rope_cache(*others, seen, q, EPS, 129)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads", [*HEADS, (2, 0)])
def test_rope_cache_matches_its_reference_for_every_head_grouping(cuda_backend, heads, kv_heads, dtype):
    trees, lengths = [comb(20), chain(3), star(9)], [70, 0, 62]
    check_rope(cuda_backend, rope_arguments(trees, lengths, heads, kv_heads, 16, dtype), heads, 16)


@pytest.mark.parametrize("dim", [2, *HEAD_DIMS])
@pytest.mark.parametrize("norms", [(False, False), (True, False), (False, True)])
def test_rope_cache_matches_its_reference_for_every_head_dim(cuda_backend, dim, norms):
    trees, lengths = [random_tree(7), chain(5)], [61, 130]
    check_rope(cuda_backend, rope_arguments(trees, lengths, 3, 1, dim, torch.float32, norms), 3, dim)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("dim, rotated", [(16, 2), (16, 16), (80, 20), (128, 66), (256, 64)])
def test_rope_cache_rotates_a_part_of_a_head_and_leaves_gates_out(cuda_backend, dim, rotated, gates):
    trees, lengths = [random_tree(7), chain(5)], [61, 130]
    arguments = rope_arguments(trees, lengths, 4, 2, dim, torch.float32)
    if gates:
        arguments[0] = randn(12, (2 * 4 + 2 * 2) * dim, seed=3)
    arguments[1:3] = rope_tables(150, rotated)
    whole = check_rope(cuda_backend, arguments, 4, dim)
    arguments[5] += 3
    moved = check_rope(cuda_backend, arguments, 4, dim)
    assert torch.equal(whole[0][..., rotated:], moved[0][..., rotated:])
    assert not torch.equal(whole[0][..., :rotated], moved[0][..., :rotated])


@pytest.mark.parametrize(
    "heads, kv_heads, dim", [(1, 1, 2), (2, 2, 20), (6, 2, 64), (5, 1, 24), (9, 3, 72), (2, 2, 256)]
)
@pytest.mark.parametrize("norms", [("whole", "whole"), ("whole", None), (True, "whole")], ids=str)
def test_rope_cache_normalises_whole_rows(cuda_backend, heads, kv_heads, dim, norms):
    trees, lengths = [random_tree(7), chain(5)], [61, 130]
    for dtype in CACHE_DTYPES:
        check_rope(cuda_backend, rope_arguments(trees, lengths, heads, kv_heads, dim, dtype, norms), heads, dim)


@pytest.mark.parametrize("first_node", [1, 5])
def test_rope_cache_writes_the_later_nodes_where_the_whole_tree_has_them(cuda_backend, first_node):
    trees, lengths = [comb(20), chain(5), random_tree(9)], [70, 0, 62]
    arguments = rope_arguments(trees, lengths, 4, 2, 16, torch.float32)
    whole = roped(cuda_backend, arguments, 4, 16)
    view = arguments[6]
    rows, starts = later_rows(view.row_start, first_node)
    written = [full.clone() for full in whole[1:]]
    for side in written:
        for b, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
            for node in range(first_node, first_node + end - begin):
                slot = lengths[b] + node
                side[int(view.block_table[b, slot // 64]), :, slot % 64] = POISON
    later = KVCacheView(*written, view.block_table, view.lengths, starts, first_node)
    there = put_copies(cuda_backend, [arguments[0][rows], *arguments[1:5], arguments[5][rows], later])
    q = cuda_backend.put(torch.full((len(rows), 4, 16), POISON))
    rope_cache(*there, q, EPS)
    assert torch.equal(q.cpu(), whole[0][rows])
    for side, full in zip(there[6][:2], whole[1:], strict=True):
        assert torch.equal(side.cpu().nan_to_num(POISON), full.nan_to_num(POISON))


@pytest.mark.parametrize("length", PREFIX_LENGTHS)
def test_rope_cache_writes_the_right_slots_at_page_edges(cuda_backend, length):
    trees = [random_tree(70, seed=length)]
    check_rope(cuda_backend, rope_arguments(trees, [length], 2, 1, 8, torch.bfloat16), 2, 8)


def test_rope_cache_finds_the_request_of_every_row_among_many(cuda_backend):
    trees, lengths = [chain(1 + b % 3) for b in range(70)], [b % 5 for b in range(70)]
    arguments = rope_arguments(trees, lengths, 1, 1, 8, torch.float32)
    check_rope(cuda_backend, arguments, 1, 8)


@pytest.mark.parametrize("norm", [True, "whole"])
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_padding_rows_become_zeros_and_leave_the_cache_alone(cuda_backend, dtype, norm):
    trees, lengths = [chain(5), star(5), chain(5)], [60, 0, 7]
    arguments = rope_arguments(trees, lengths, 4, 2, 16, dtype, (norm, norm))
    depths, row_start = arguments[5], arguments[6].row_start
    depths[3:5], depths[9], row_start[3] = -1, -1, 13  # the last two rows belong to no request
    arguments[0][13:] = torch.nan
    q, _, _ = check_rope(cuda_backend, arguments, 4, 16)
    padding = [3, 4, 9, 13, 14]
    assert q[padding].eq(0).all() and q.abs().sum(dim=(1, 2)).eq(0).sum() == len(padding)


@pytest.mark.parametrize("norm", [True, "whole"])
def test_a_node_is_rotated_to_the_same_bits_as_its_token_in_plain_decoding(cuda_backend, norm):
    tree, length, dim = random_tree(33, seed=6), 50, 20
    arguments = rope_arguments([tree], [length], 4, 2, dim, torch.bfloat16, (norm, norm))
    q, k, _ = roped(cuda_backend, arguments, 4, dim)
    lengths = [length + depth for depth in depths_of([tree]).tolist()]
    alone = rope_arguments([[-1]] * 33, lengths, 4, 2, dim, torch.bfloat16)
    alone[:5] = arguments[:5]
    decoded, keys, _ = roped(cuda_backend, alone, 4, dim)
    assert torch.equal(q, decoded)
    for row, at in enumerate(lengths):
        slot, page = length + row, int(arguments[6].block_table[0, (length + row) // 64])
        other = int(alone[6].block_table[row, at // 64])
        assert torch.equal(k[page, :, slot % 64], keys[other, :, at % 64])


@pytest.mark.parametrize("side, size", [("q_norm", 32), ("k_norm", 64)])
def test_a_norm_of_another_size_is_refused(cuda_backend, side, size):
    arguments = rope_arguments([[-1]], [0], 4, 2, 16, torch.float32)
    arguments[3 if side == "q_norm" else 4] = torch.ones(size)
    with pytest.raises(ValueError, match=rf"^{side}: expected shape"):
        rope_cache(*put_copies(cuda_backend, arguments), cuda_backend.put(torch.zeros(1, 4, 16)), EPS)


def test_heads_too_wide_for_the_kernel_are_refused(cuda_backend):
    arguments = put_copies(cuda_backend, rope_arguments([[-1]], [0], 1, 1, 258, torch.float32))
    with pytest.raises(ValueError, match=r"^k_cache: head dim 258, at most 256"):
        rope_cache(*arguments, cuda_backend.put(torch.zeros(1, 1, 258)), EPS)
