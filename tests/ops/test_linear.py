"""linear, pack_linear and gather_rows against PyTorch, and the bits of a row whatever it is computed with."""

import pytest
import torch

from specengine import _C
from specengine.ops.linear import (
    empty_weight,
    empty_weight_reference,
    gather_rows,
    gather_rows_reference,
    linear,
    linear_reference,
    pack_linear,
    pack_linear_reference,
)
from tests.ops.cases import DTYPES, randn

pytestmark = pytest.mark.usefixtures("wide_instruction_set")

CPU = torch.device("cpu")
SHAPES = [(1, 1), (7, 5), (16, 8), (17, 30), (33, 100), (50, 257), (160, 64)]  # (N, C)


def packed_weight(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weight = empty_weight(*rows.shape, dtype, CPU)
    pack_linear(rows, weight, 0)
    return weight


def run_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: int) -> torch.Tensor:
    out = torch.full((len(x), columns), torch.nan)
    linear(x, weight, bias, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_linear_matches_float64_for_every_row_count(rows, columns, with_bias, dtype):
    weight = randn(rows, columns, seed=2).to(dtype)
    bias = randn(rows, seed=3) if with_bias else None
    packed = packed_weight(weight, dtype)
    for m in (0, 1, 2, 5, 6, 7, 12, 13, 70):
        x = randn(m, columns, seed=m)
        expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
        torch.testing.assert_close(run_linear(x, packed, bias, rows).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_linear_and_its_reference_agree_through_the_same_calls(dtype, tolerance):
    rows, bias, x = randn(37, 30, seed=2), randn(37, seed=3), randn(9, 30)
    native, reference = empty_weight(37, 30, dtype, CPU), empty_weight_reference(37, 30, dtype, CPU)
    for first, block in ((0, rows[:10]), (10, rows[10:])):
        pack_linear(block, native, first)
        pack_linear_reference(block, reference, first)
    out, expected = torch.empty(9, 37), torch.empty(9, 37)
    linear(x, native, bias, out)
    linear_reference(x, reference, bias, expected)
    torch.testing.assert_close(out, expected, atol=10 * tolerance, rtol=tolerance)
    ids = torch.tensor([36, 0, 15, 16, 16], dtype=torch.int32)
    out, expected = torch.empty(5, 30), torch.empty(5, 30)
    gather_rows(native, ids, out)
    gather_rows_reference(reference, ids, expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_rows(dtype):
    packed, bias, x = packed_weight(randn(50, 93, seed=2), dtype), randn(50, seed=3), randn(70, 93)
    alone = torch.cat([run_linear(row[None], packed, bias, 50) for row in x])
    for m in range(1, 71):
        assert torch.equal(run_linear(x[:m].contiguous(), packed, bias, 50), alone[:m]), f"M={m}"
        assert torch.equal(run_linear(x[70 - m :].contiguous(), packed, bias, 50), alone[70 - m :]), f"last {m}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_does_not_change_a_bit(dtype):
    packed, x = packed_weight(randn(330, 40, seed=2), dtype), randn(13, 40)
    results = []
    for threads in (1, 2, 3):
        _C.set_num_threads(threads)
        results.append(run_linear(x, packed, None, 330))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_linear_writes_exactly_its_rows_of_the_panels(source, dtype):
    rows = randn(21, 6, seed=4).to(source)
    packed = torch.full((3, 6, 16), 7.0, dtype=dtype)
    pack_linear(rows, packed, 13)
    flat = packed.transpose(1, 2).reshape(48, 6)
    assert torch.equal(flat[13:34], rows.to(dtype))
    assert (flat[:13] == 7).all() and (flat[34:] == 7).all()
    untouched = packed.clone()
    pack_linear(rows[:0], packed, 48)
    assert torch.equal(packed, untouched)


def test_every_float16_value_is_read_as_torch_reads_it():
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short()
    halves = bits.view(torch.float16).view(-1, 16).contiguous()
    weight = packed_weight(halves, torch.float32)
    flat = weight.transpose(1, 2).reshape(-1, 16)
    torch.testing.assert_close(flat, halves.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(flat[halves == 0]), torch.signbit(halves[halves == 0]))


def test_float32_is_rounded_to_bfloat16_as_torch_rounds_it():
    bits = torch.randint(-(1 << 31), 1 << 31, (4096, 16), generator=torch.Generator().manual_seed(5)).int()
    edges = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x00008000]
    bits[0, :8] = torch.tensor(edges, dtype=torch.int64).int()
    rows = bits.view(torch.float32)
    flat = packed_weight(rows, torch.bfloat16).transpose(1, 2).reshape(-1, 16)
    torch.testing.assert_close(flat, rows.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_reaches_every_output_it_should_and_no_other(dtype):
    packed, x = packed_weight(randn(20, 9, seed=2), dtype), randn(8, 9)
    clean = run_linear(x, packed, None, 20)
    x[3, 4] = torch.nan
    out = run_linear(x, packed, None, 20)
    assert out[3].isnan().all()
    others = [m for m in range(8) if m != 3]
    assert torch.equal(out[others], clean[others])
