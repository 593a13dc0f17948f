"""linear, quantise_rows and linear_argmax against plain arithmetic; a row has its bits whatever it is computed with."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from specengine import _C
from specengine.ops.linear import (
    Projection,
    linear,
    linear_argmax,
    linear_argmax_reference,
    linear_reference,
    quantise_rows,
)
from specengine.ops.weight import FLOAT_FORMATS, Weight, empty_weight, pack_blocks, pack_linear
from tests.ops.cases import randn
from tests.ops.packing import CPU, FORMATS, QUANTISED, packed, row_blocks, values_of, values_of_rows

ROW_COUNTS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 70)
COLUMNS = (1, 31, 32, 33, 96, 576)

every_instruction_set = pytest.mark.usefixtures("wide_instruction_set")
every_format = pytest.mark.parametrize("form", FORMATS)


def layer_of(rows: int, columns: int, form: str, *, bias: bool = False, seed: int = 2) -> Projection:
    return Projection((packed(randn(rows, columns, seed=seed), form),), randn(rows, seed=seed + 1) if bias else None)


def expected_of(x: torch.Tensor, layer: Projection) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 x @ weight^T + bias from what x and weight stand for, and the sum of the sizes of its terms."""
    weight = torch.cat([values_of(part, x.shape[1]) for part in layer.weights]).double()
    values = values_of_rows(x) if layer.weights[0].quantises_rows else x.double()
    bias = torch.zeros(layer.rows) if layer.bias is None else layer.bias
    return values @ weight.T + bias, values.abs() @ weight.abs().T + bias.abs()


def check(x: torch.Tensor, layer: Projection) -> None:
    expected, size = expected_of(x, layer)
    out = linear(x, layer)
    assert out.dtype == torch.float32 and out.shape == (len(x), layer.rows)
    error = (out - expected).abs()
    assert (error <= 1e-5 * size + 1e-7).all(), f"M={len(x)}: error of {float((error / (size + 1e-30)).max()):.1e}"


@every_instruction_set
@every_format
@pytest.mark.parametrize("columns", COLUMNS)
def test_linear_is_the_product_of_what_rows_and_weight_stand_for(form, columns):
    for rows, bias in ((1, True), (17, False), (50, True)):
        layer = layer_of(rows, columns, form, bias=bias)
        for m in ROW_COUNTS:
            check(randn(m, columns, seed=m), layer)


@every_instruction_set
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_a_file_multiply_as_their_values_do(kind):
    form = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4_min"}[kind]
    blocks = quants.quantize(randn(37, 96).numpy(), GGMLQuantizationType[kind])
    weight = empty_weight(37, 96, form, CPU)
    pack_blocks(torch.from_numpy(blocks), weight, 0, kind)
    x = randn(9, 96, seed=2)
    expected = values_of_rows(x) @ torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[kind])).double().T
    torch.testing.assert_close(linear(x, Projection((weight,), None)).double(), expected, rtol=1e-4, atol=1e-4)


@every_instruction_set
@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("columns", [31, 96, 300])
def test_rows_of_floats_have_the_bits_that_float32_weights_of_the_same_values_give_them(form, columns):
    weight, bias, x = packed(randn(37, columns, seed=2), form), randn(37, seed=3), randn(13, columns)
    values = packed(values_of(weight, columns), "float32")
    out = linear(x, Projection((weight,), bias, float_rows=True))
    if form == "e4m3":  # it sums blocks of 128 columns by themselves
        torch.testing.assert_close(out, linear(x, Projection((values,), bias)), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(out, linear(x, Projection((values,), bias)))
        assert not torch.equal(out, linear(x, Projection((weight,), bias)))


@pytest.mark.parametrize("form", QUANTISED)
def test_quantised_arithmetic_is_close_to_that_of_floats(form):
    weight, x = randn(64, 576, seed=2), randn(16, 576)
    exact = x.double() @ weight.double().T
    error = (linear(x, Projection((packed(weight, form),), None)) - exact).std() / exact.std()
    assert error < (0.02 if form in ("q8", "int8_32", "int8_128") else 0.05 if form == "e4m3" else 0.15)


@every_instruction_set
@every_format
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_rows(form):
    layer, x = layer_of(50, 93, form, bias=True), randn(70, 93)
    alone = torch.cat([linear(row[None], layer) for row in x])
    for m in range(1, 71):
        assert torch.equal(linear(x[:m], layer), alone[:m]), f"M={m}"
        assert torch.equal(linear(x[70 - m :], layer), alone[70 - m :]), f"last {m}"


@every_instruction_set
@every_format
def test_rows_that_outgrow_the_cache_keep_their_bits(form):
    layer, x = layer_of(33, 3000, form), randn(100, 3000)
    alone = torch.cat([linear(row[None], layer) for row in x])
    assert torch.equal(linear(x, layer), alone)


@every_instruction_set
@every_format
def test_the_number_of_threads_does_not_change_a_bit(form):
    layer, x = layer_of(330, 40, form, bias=True), randn(13, 40)
    results = []
    for threads in (1, 2, 3):
        _C.set_num_threads(threads)
        results.append((linear(x, layer), linear_argmax(x, layer)))
    for scores, ids in results[1:]:
        assert torch.equal(scores, results[0][0]) and torch.equal(ids, results[0][1])


@every_format
@pytest.mark.parametrize("columns", [33, 576])
def test_instruction_sets_with_a_fused_multiply_add_agree_to_the_bit(form, columns):
    layer, x, before = layer_of(50, columns, form, bias=True), randn(19, columns), _C.instruction_set()
    results = {}
    for name in _C.instruction_sets:
        _C.set_instruction_set(name)
        results[name] = linear(x, layer)
    _C.set_instruction_set(before)
    portable = results.pop("portable")
    for name, result in results.items():
        assert torch.equal(result, next(iter(results.values()))), name
        torch.testing.assert_close(result, portable, rtol=1e-4, atol=1e-4)


@every_instruction_set
@pytest.mark.parametrize(
    "form, others", [("q8", ("q4_min", "q4")), ("q4_min", ("q8", "q8")), ("float32", ("bfloat16", "float16"))]
)
def test_a_projection_of_several_weights_is_that_of_each_beside_the_others(form, others):
    parts = [layer_of(n, 64, f, bias=True, seed=n) for n, f in ((21, form), (16, others[0]), (5, others[1]))]
    fused = Projection(tuple(part.weights[0] for part in parts), torch.cat([part.bias for part in parts]))
    assert fused.rows == 42 and fused.nbytes == sum(part.nbytes for part in parts)
    for m in (1, 9):
        x = randn(m, 64)
        assert torch.equal(linear(x, fused), torch.cat([linear(x, part) for part in parts], dim=1))
        check(x, fused)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 3e-3), ("bfloat16", 2e-2)])
def test_linear_and_its_reference_agree_through_the_same_calls(dtype, tolerance):
    rows, bias, x = randn(37, 30, seed=2), randn(37, seed=3), randn(9, 30)
    native = Projection((packed(rows[:20], dtype), packed(rows[20:], dtype)), bias)
    held = rows.to(FLOAT_FORMATS[dtype])
    reference = Projection((Weight(held[:20], 20, dtype), Weight(held[20:], 17, dtype)), bias)
    torch.testing.assert_close(linear(x, native), linear_reference(x, reference), atol=10 * tolerance, rtol=tolerance)


@every_instruction_set
@every_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_reaches_every_output_of_its_row_and_no_other(form, bad):
    layer, x = layer_of(20, 70, form), randn(8, 70)
    clean = linear(x, layer)
    for column in (4, 69):
        poisoned = x.clone()
        poisoned[3, column] = bad
        out = linear(poisoned, layer)
        assert not out[3].isfinite().any()
        assert out[3].isnan().all() or (not layer.weights[0].quantises_rows and abs(bad) == torch.inf)
        others = [m for m in range(8) if m != 3]
        assert torch.equal(out[others], clean[others])
        assert linear_argmax(poisoned, layer).tolist()[3] == -1


@every_instruction_set
@pytest.mark.parametrize("form", ["q8", "q4_min"])
def test_a_weight_that_is_not_finite_reaches_its_output_and_no_other(form):
    rows, x = randn(20, 70, seed=2), randn(5, 70)
    clean = linear(x, Projection((packed(rows, form),), None))
    rows[7, 40] = torch.inf
    out = linear(x, Projection((packed(rows, form),), None))
    assert out[:, 7].isnan().all()
    assert torch.equal(out[:, [n for n in range(20) if n != 7]], clean[:, [n for n in range(20) if n != 7]])


EXTREMES = {  # codes as the file has them, by column
    "Q8_0": [
        lambda c: -128 + 0 * c,
        lambda c: 127 + 0 * c,
        lambda c: np.where(c % 2, -128, 127),
        lambda c: -c % 256 - 128,
    ],
    "Q4_0": [lambda c: 0 * c, lambda c: 15 + 0 * c, lambda c: c % 2 * 15],
    "Q4_1": [lambda c: 0 * c, lambda c: 15 + 0 * c, lambda c: c % 2 * 15],
}


@every_instruction_set
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_codes_do_not_overflow(kind):
    column = np.arange(576)
    form = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4_min"}[kind]
    rows = []
    for codes in EXTREMES[kind]:
        blocks = codes(column).astype(np.int64).reshape(-1, 32) & 255
        data = blocks if kind == "Q8_0" else blocks[:, :16] | blocks[:, 16:] << 4
        head = np.array([1.0] if kind != "Q4_1" else [1.0, -20.0], np.float16).view(np.uint8)
        rows.append(np.concatenate([np.tile(head, (len(data), 1)), data.astype(np.uint8)], axis=1).ravel())
    blocks = np.stack(rows)
    weight = empty_weight(len(rows), 576, form, CPU)
    pack_blocks(torch.from_numpy(blocks), weight, 0, kind)
    values = quants.dequantize(blocks, GGMLQuantizationType[kind]).astype(np.float64)
    assert np.array_equal(values_of(weight, 576).numpy(), values) and abs(values).max() >= 8
    signs = torch.from_numpy(column % 2 * 2 - 1)
    x = 127.0 * torch.stack([torch.ones(576), -torch.ones(576), signs, -signs, (signs + 1) // 2])
    assert set(row_blocks(x)["code"].ravel().tolist()) <= {127, -127, 0}
    expected = x.double() @ torch.from_numpy(values).T
    torch.testing.assert_close(linear(x, Projection((weight,), None)).double(), expected, rtol=1e-5, atol=1e-2)


def quantise_model(x: np.ndarray) -> dict[str, np.ndarray]:
    """quantise_rows in numpy, float32 as it is: blocks of 32, absmax / 127, rounded half to even."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    finite = np.isfinite(blocks).all(axis=2)
    blocks = np.where(finite[..., None], blocks, 0)
    top = np.abs(blocks).max(axis=2)
    inverse = np.divide(np.float32(127), top, where=top > np.float32(1e-35), out=np.zeros_like(top))
    code = np.rint(blocks * inverse[..., None]).astype(np.int8)
    code_sum = code.sum(axis=2, dtype=np.int32)
    scale = np.where(finite, top * (np.float32(1) / np.float32(127)), np.float32(np.nan))
    with np.errstate(over="ignore"):
        total = scale * code_sum.astype(np.float32)
    return {"code": code, "scale": scale, "sum": total, "code_sum": code_sum}


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("columns", [*COLUMNS, 7, 64, 65])
def test_quantise_rows_matches_its_model(columns):
    x = randn(23, columns) * torch.logspace(-30, 30, 23)[:, None]
    x[2], x[3], x[4] = 0, -0.0, 1e-40
    x[5, 0], x[6, -1], x[7, columns // 2] = torch.nan, torch.inf, -torch.inf
    x[8] = (torch.arange(columns) % 255 - 127).float() / 2  # halves: every code is a tie where absmax is 63.5
    x[8, 0] = 63.5
    x[9], x[10] = 3e38, -3e38
    blocks, model = row_blocks(x), quantise_model(x.numpy())
    for name, expected in model.items():
        np.testing.assert_array_equal(blocks[name], expected, err_msg=name)
    assert quantise_rows(x[:0]).shape == (0, -(-columns // 32), 44)


def test_rounding_is_half_to_even():
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    assert row_blocks(x)["code"][0, 0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_rows_are_quantised_to_the_same_bytes_by_every_instruction_set_and_any_number_of_threads():
    x, before, results = randn(40, 100), _C.instruction_set(), []
    for name in _C.instruction_sets:
        _C.set_instruction_set(name)
        for threads in (1, 3):
            _C.set_num_threads(threads)
            results.append(quantise_rows(x))
    _C.set_instruction_set(before)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(torch.cat([quantise_rows(row[None]) for row in x]), results[0])


@every_instruction_set
@every_format
@pytest.mark.parametrize("rows", [1, 16, 37, 1000])
def test_linear_argmax_is_the_argmax_of_linear(form, rows):
    for bias in (False, True):
        layer = layer_of(rows, 33, form, bias=bias)
        for m in (0, 1, 9, 40):
            x = randn(m, 33, seed=m)
            ids = linear_argmax(x, layer)
            assert ids.dtype == torch.int32
            assert ids.tolist() == linear(x, layer).argmax(dim=1).tolist()


@every_instruction_set
@every_format
def test_padding_does_not_win_where_all_scores_are_negative(form):
    weight = Projection((packed(-1 - randn(37, 33).abs(), form),), None)
    x = 1 + randn(9, 33).abs()
    scores = linear(x, weight)
    assert (scores < 0).all()
    assert linear_argmax(x, weight).tolist() == scores.argmax(dim=1).tolist()


def argmax_of(scores: torch.Tensor) -> int:
    """linear_argmax where the scores are these: they are the bias of a weight of zeros."""
    layer = Projection((empty_weight(len(scores), 8, "float32", CPU),), scores)
    layer.weights[0].data.zero_()
    assert torch.equal(linear(torch.ones(1, 8), layer)[0].nan_to_num(7), (scores + 0).nan_to_num(7))
    (found,) = linear_argmax(torch.ones(1, 8), layer).tolist()
    reference = Projection((Weight(torch.zeros(len(scores), 8), len(scores), "float32"),), scores)
    assert linear_argmax_reference(torch.ones(1, 8), reference).tolist() == [found]
    return found


@every_instruction_set
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_ties_go_to_the_lower_id(threads):
    _C.set_num_threads(threads)
    for count in (1, 16, 17, 1000):
        assert argmax_of(torch.zeros(count)) == 0
        assert argmax_of(torch.full((count,), -5.0)) == 0
        scores = randn(count).mul(2).round()
        assert argmax_of(scores) == int((scores == scores.max()).nonzero()[0])
    scores = torch.full((1000,), -1.0)
    scores[[300, 17, 999]] = 2.0
    assert argmax_of(scores) == 17


def test_negative_zero_ties_with_zero(wide_instruction_set):
    scores = torch.full((40,), -1.0)
    scores[30], scores[35] = -0.0, 0.0
    layer = Projection((packed(torch.zeros(40, 8), "float32"),), scores)
    assert argmax_of(scores) == 30
    scores[20], scores[30] = 0.0, -0.0
    assert linear_argmax(torch.ones(1, 8), layer).tolist() == [20]
    # A fused product that underflows keeps its sign, and no bias turns it into zero here.
    layer = Projection((packed(torch.tensor([-1e-30, 1e-30] * 20)[:, None], "float32"),), None)
    assert torch.signbit(linear(torch.tensor([[1e-30]]), layer)[0, :2]).tolist() == [
        wide_instruction_set != "portable",
        False,
    ]
    assert linear_argmax(torch.tensor([[1e-30], [-1e-30]]), layer).tolist() == [0, 0]


@every_instruction_set
@pytest.mark.parametrize("place", [0, 5, 16, 36])
def test_scores_without_a_finite_maximum_have_no_argmax(place):
    scores = randn(37)
    best = int(scores.argmax())
    for bad in (torch.nan, -torch.nan, torch.inf):
        poisoned = scores.clone()
        poisoned[place] = bad
        assert argmax_of(poisoned) == -1
        poisoned[(place + 20) % 37] = torch.inf
        assert argmax_of(poisoned) == -1
    masked = scores.clone()
    masked[[i for i in range(37) if i != best and i % 3 == place % 3]] = -torch.inf
    assert argmax_of(masked) == best
    masked[:] = -torch.inf
    assert argmax_of(masked) == -1
    masked[place] = -3e38
    assert argmax_of(masked) == place
    masked[place] = 3e38
    assert argmax_of(masked) == place


def test_many_threads_agree_on_one_maximum():
    layer, x = layer_of(5000, 16, "float32", bias=True), randn(7, 16)
    layer.bias[4000:] = 50.0
    expected = linear(x, layer).argmax(dim=1).tolist()
    for threads in (1, 2, 3, 8):
        _C.set_num_threads(threads)
        for _ in range(20):
            assert linear_argmax(x, layer).tolist() == expected


@every_instruction_set
def test_an_output_outside_the_written_columns_is_left_alone():
    out, weight, x = torch.full((3, 30), 7.0), packed(randn(20, 32), "q8"), randn(3, 32)
    _C.linear(quantise_rows(x), weight.data, None, out, 4, 20, 0, None)
    assert torch.equal(out[:, 4:24], linear(x, Projection((weight,), None)))
    assert (out[:, :4] == 7).all() and (out[:, 24:] == 7).all()


def test_a_weight_may_be_refilled_between_calls():
    weight, x = packed(randn(20, 32), "q8"), randn(3, 32)
    pack_linear(randn(20, 32, seed=9), weight, 0)
    assert torch.equal(
        linear(x, Projection((weight,), None)), linear(x, Projection((packed(randn(20, 32, seed=9), "q8"),), None))
    )
