"""Packed weights: what every format holds, exactly its rows, and the blocks of GGUF files as they are."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from specengine.ops.coded.rows import CodedRows, Coding
from specengine.ops.weight import (
    FLOAT_FORMATS,
    PACKED_BLOCKS,
    UNPACKED_BLOCKS,
    Weight,
    coded_format,
    empty_weight,
    empty_weight_reference,
    gather_rows,
    gather_rows_reference,
    pack_blocks,
    pack_coded,
    pack_linear,
    pack_linear_reference,
    requantise_blocks,
    unpack_blocks,
)
from tests.ops.cases import randn
from tests.ops.coding import CODED, coded
from tests.ops.packing import CPU, FORMATS, packed, values_of, write

pytestmark = pytest.mark.usefixtures("instruction_set")

FROM_FLOATS = tuple(form for form in FORMATS if form != "q4")
SHAPES = [(1, 1), (7, 31), (16, 32), (17, 33), (33, 100), (50, 257)]  # (N, C)
SOURCES = [torch.float32, torch.bfloat16, torch.float16]


def errors_allowed(rows: torch.Tensor, form: str) -> torch.Tensor:
    """Largest error of every entry: half a step of its block, and what float16 takes from scale and minimum."""
    columns = rows.shape[1]
    blocks = torch.nn.functional.pad(rows, (0, -columns % 32)).view(len(rows), -1, 32)
    low, high = blocks.amin(dim=2).clamp(max=0), blocks.amax(dim=2).clamp(min=0)
    if form in CODED:  # half of the largest step between two numbers of the coding, and zero points are rounded
        size, group = len(rows), CODED[form].group
        groups = torch.nn.functional.pad(rows, (0, -columns % group)).view(size, -1, group)
        wide = groups.amax(dim=2).clamp(min=0) - groups.amin(dim=2).clamp(max=0)
        most = groups.abs().amax(dim=2)
        step = {"int4": wide / 15, "int8": wide / 255, "e2m1": most / 3, "iq4": most * 24 / 113, "e4m3": most / 14}
        bound = step[CODED[form].kind] * (1.01 if CODED[form].zeros else 0.51) + most * 2.0**-9 + 4e-6
        return bound[:, :, None].expand(-1, -1, group).reshape(size, -1)[:, :columns]
    if form == "q8":
        bound = torch.maximum(high, -low) * (0.501 / 127)
    else:
        bound = (high - low) * (0.501 / 15) + torch.maximum(high, -low) * 2.0**-9
    return (bound + 4e-6)[:, :, None].expand(-1, -1, 32).reshape(len(rows), -1)[:, :columns]


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("form", FROM_FLOATS)
def test_packed_floats_come_back_within_the_error_of_the_format(form, source, rows, columns):
    weight = randn(rows, columns, seed=4).to(source)
    weight[-1] *= 1e-3  # every row has scales of its own
    values = values_of(packed(weight, form), columns)
    if form in FLOAT_FORMATS:
        assert torch.equal(values, weight.to(FLOAT_FORMATS[form]).float())
    else:
        error = (values - weight.float()).abs()
        assert (error <= errors_allowed(weight.float(), form)).all()
        assert columns < 31 or error.max() > 0


@pytest.mark.parametrize("form", FROM_FLOATS)
def test_zeros_stay_exactly_zero(form):
    weight = randn(20, 70, seed=4)
    weight[3], weight[:, 32:64], weight[5, :32] = 0, 0, -0.0
    values = values_of(packed(weight, form), 70)
    assert (values[3] == 0).all() and (values[:, 32:64] == 0).all() and (values[5, :32] == 0).all()


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_empty_is_zero_where_it_is_multiplied_without_being_written(form):
    weight = empty_weight(20, 40, form, CPU)
    assert not weight.data[-1].any()
    assert not weight.quantises_rows or not weight.data.any()
    assert weight.data.shape[0] == 2 and weight.rows == 20


@pytest.mark.parametrize("form", FROM_FLOATS)
@pytest.mark.parametrize("first, count", [(0, 5), (13, 21), (16, 16), (31, 1), (15, 2), (48, 0), (0, 48)])
def test_exactly_the_given_rows_are_written(form, first, count):
    weight, rows = packed(randn(48, 70, seed=2), form), randn(count, 70, seed=3)
    before, panels = values_of(weight, 70), weight.data.clone()
    write(rows, weight, first)
    after = values_of(weight, 70)
    others = [row for row in range(48) if not first <= row < first + count]
    assert torch.equal(after[others], before[others])
    if count:
        assert torch.equal(after[first : first + count], values_of(packed(rows, form), 70))
    for panel in range(3):  # and in panels that have none of the rows, not a byte
        if count == 0 or not first // 16 <= panel <= (first + count - 1) // 16:
            assert torch.equal(weight.data[panel].view(torch.uint8), panels[panel].view(torch.uint8))


@pytest.mark.parametrize("form, largest", [("q8", 8e6), ("q4_min", 6e4)])
def test_a_block_with_a_weight_that_is_not_finite_or_too_large_is_nan_and_no_other_is(form, largest):
    rows = randn(20, 96, seed=2)
    clean = values_of(packed(rows, form), 96)
    bad = [torch.nan, torch.inf, -torch.inf, 1e9, -1e9]
    for row, value in enumerate(bad):
        rows[2 * row, 40] = value
    rows[17, 40] = largest
    values = values_of(packed(rows, form), 96)
    poisoned = torch.zeros(20, 96, dtype=torch.bool)
    poisoned[: 2 * len(bad) : 2, 32:64] = True
    assert torch.equal(values.isnan(), poisoned)
    assert abs(values[17, 40] / largest - 1) < 1e-2
    poisoned[17, 32:64] = True
    assert torch.equal(values[~poisoned], clean[~poisoned])


@pytest.mark.parametrize("form", ["q8", "q4_min"])
def test_weights_below_the_smallest_scale_become_zero(form):
    rows = randn(3, 32) * torch.tensor([1e-9, 1e-30, 1e-42])[:, None]
    assert values_of(packed(rows, form), 32).abs().max() < 3e-8


@pytest.mark.parametrize("dtype", FLOAT_FORMATS)
def test_the_reference_holds_the_same_floats(dtype):
    rows = randn(37, 30, seed=2)
    native, reference = empty_weight(37, 30, dtype, CPU), empty_weight_reference(37, 30, dtype, CPU)
    for first, block in ((0, rows[:10]), (10, rows[10:])):
        pack_linear(block, native, first)
        pack_linear_reference(block, reference, first)
    ids = torch.tensor([36, 0, 15, 16, 16], dtype=torch.int32)
    out, expected = torch.empty(5, 30), torch.empty(5, 30)
    gather_rows(native, ids, out)
    gather_rows_reference(reference, ids, expected)
    assert torch.equal(out, expected)


def test_the_reference_has_no_quantised_formats():
    with pytest.raises(ValueError, match=r"^format: q8 has no reference, expected one of float32, float16, bfloat16$"):
        empty_weight_reference(3, 32, "q8", CPU)


def test_every_float16_value_is_read_as_torch_reads_it():
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short()
    halves = bits.view(torch.float16).view(-1, 16).contiguous()
    for form in ("float32", "float16"):
        values = values_of(packed(halves, form), 16)
        torch.testing.assert_close(values, halves.float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(values[halves == 0]), torch.signbit(halves[halves == 0]))


@pytest.mark.parametrize("form, edges", [
    ("bfloat16", [0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x00008000]),
    ("float16", [0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x33000000, 0x33000001, 0x33C00000, 0x7FFFFFFF]),
])  # fmt: skip
def test_float32_is_rounded_as_torch_rounds_it(form, edges):
    random = torch.Generator().manual_seed(5)
    bits = torch.randint(-(1 << 31), 1 << 31, (4096, 16), generator=random).int()
    bits[0, :8] = torch.tensor(edges, dtype=torch.int64).int()
    rows = torch.cat([bits.view(torch.float32), torch.randn(4096, 16, generator=random) * 1e-5])
    values = values_of(packed(rows, form), 16)
    torch.testing.assert_close(values, rows.to(FLOAT_FORMATS[form]).float(), rtol=0, atol=0, equal_nan=True)


def file_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """uint8 [rows, row_bytes]: random bytes, with scales that are finite."""
    rng = np.random.default_rng(seed)
    size, bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // size, bytes), dtype=np.uint8)
    halves = 2 if kind in ("Q4_1", "Q4_K") else 1
    scales = rng.standard_normal((rows, columns // size, halves)).astype(np.float16)
    scales[0, 0], scales[-1, -1] = 6e-8, 0
    blocks[..., : 2 * halves] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def check_blocks(kind: str, blocks: np.ndarray, columns: int, first: int) -> None:
    """Packs rows of a file into a weight of 50 rows and compares them with gguf's own values."""
    weight = empty_weight(50, columns, PACKED_BLOCKS[kind], CPU)
    before = packed(randn(50, columns), PACKED_BLOCKS[kind])
    weight.data.copy_(before.data)
    pack_blocks(torch.from_numpy(blocks), weight, first, kind)
    values, untouched = values_of(weight, columns), values_of(before, columns)
    own = slice(first, first + len(blocks))
    expected = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[kind]))
    assert expected.shape == (len(blocks), columns)
    if kind in ("Q8_0", "Q4_0"):
        assert torch.equal(values[own], expected)
    elif kind == "Q4_1":  # the last rounding of code * scale + minimum is fused
        terms = expected.view(-1, 32).abs().amax(dim=1).clamp(min=1e-7)[:, None] * 16
        assert ((values[own] - expected).view(-1, 32).abs() <= terms * 2.0**-23).all()
    else:  # the products of two scales are rounded to float16
        d, dmin = blocks.reshape(-1, 144)[:, :4].copy().view(np.float16).astype(np.float32).T
        bound = torch.from_numpy((15 * abs(d) + abs(dmin)) * 63 * 2.0**-11 + 16 * 2.0**-25)[:, None]
        assert ((values[own] - expected).view(-1, 256).abs() <= bound).all()
    assert torch.equal(
        torch.cat([values[:first], values[own.stop :]]), torch.cat([untouched[:first], untouched[own.stop :]])
    )


@pytest.mark.parametrize("first, rows", [(0, 50), (0, 7), (13, 21), (49, 1), (16, 16)])
@pytest.mark.parametrize("kind", PACKED_BLOCKS)
def test_blocks_of_a_file_are_kept(kind, first, rows):
    for columns in (256, 768) if kind == "Q4_K" else (32, 96):
        check_blocks(kind, file_blocks(kind, rows, columns, seed=first + rows), columns, first)
        if kind != "Q4_K":
            made = quants.quantize(randn(rows, columns, seed=rows).numpy(), GGMLQuantizationType[kind])
            check_blocks(kind, made, columns, first)


def bytes_of_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """uint8 [rows, row_bytes] with any bytes; a few half-float scales are infinite, NaN, subnormal and zero."""
    size, bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // size, bytes), dtype=np.uint8)
    at = 208 if kind == "Q6_K" else 0
    edges = np.array([0x7C00, 0xFC00, 0x7E00, 1, 0x83FF, 0, 0x8000], np.uint16)
    blocks[: len(edges), 0, at : at + 2] = edges.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", sorted(UNPACKED_BLOCKS))
def test_blocks_of_a_file_have_the_values_of_the_gguf_package(kind):
    blocks = bytes_of_blocks(kind, 40, 512, seed=len(kind))
    values = torch.full((40, 512), 7.0)
    unpack_blocks(torch.from_numpy(blocks), values, kind)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[kind]))
    assert torch.equal(values.isnan(), expected.isnan()) and not expected.isnan().all()
    assert torch.equal(values.nan_to_num(0).view(torch.int32), expected.nan_to_num(0).view(torch.int32))


@pytest.mark.parametrize("form", ["q8", "q4_min"])
@pytest.mark.parametrize("kind", sorted(UNPACKED_BLOCKS))
def test_blocks_are_requantised_as_their_values_are_packed(kind, form):
    blocks = bytes_of_blocks(kind, 40, 512, seed=len(kind))
    with np.errstate(all="ignore"):
        values = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[kind]))
    for first, rows in ((0, 40), (13, 21), (49, 1)):
        weight, expected = empty_weight(50, 512, form, CPU), empty_weight(50, 512, form, CPU)
        requantise_blocks(torch.from_numpy(blocks[:rows]), weight, first, kind)
        pack_linear(values[:rows], expected, first)
        assert torch.equal(weight.data, expected.data)
        assert expected.data.any()


def quantised(x: np.ndarray, form: str) -> np.ndarray:
    """The definition of q8 and q4_min in numpy: float32 values of blocks [B, 32]."""
    low, high = x.min(1, initial=0), x.max(1, initial=0)
    four = form == "q4_min"
    scale = ((high - low) / np.float32(15) if four else np.maximum(high, -low) / np.float32(127)).astype(np.float16)
    offset = (low if four else np.zeros_like(low)).astype(np.float16).astype(np.float32)[:, None]
    scale = scale.astype(np.float32)[:, None]
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(np.clip((x - offset) * inverse, *((0, 15) if four else (-127, 127)))).astype(np.float32)
    return scale * codes + offset


@pytest.mark.parametrize("form", ["q8", "q4_min"])
def test_floats_are_quantised_as_defined(form):
    sizes = 10.0 ** torch.arange(-4, 4).repeat(8)[:, None]
    x = torch.cat([randn(64, 96) * sizes, torch.zeros(2, 96), -randn(3, 96).abs()])
    x[0] = torch.arange(96) / 2  # many ties between two codes
    expected = torch.from_numpy(quantised(x.numpy().reshape(-1, 32), form)).view(x.shape)
    torch.testing.assert_close(values_of(packed(x, form), 96), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", PACKED_BLOCKS)
def test_no_rows_are_no_change(kind):
    weight = packed(randn(20, 256), PACKED_BLOCKS[kind])
    before = weight.data.clone()
    row_bytes = file_blocks(kind, 1, 256, 0).shape[1]
    pack_blocks(torch.empty(0, row_bytes, dtype=torch.uint8), weight, 20, kind)
    assert torch.equal(weight.data, before)


def test_rows_of_one_weight_may_come_from_floats_and_from_blocks():
    rows = randn(40, 64)
    blocks = quants.quantize(rows[20:].numpy(), GGMLQuantizationType.Q8_0)
    weight = empty_weight(40, 64, "q8", CPU)
    pack_blocks(torch.from_numpy(blocks), weight, 20, "Q8_0")
    pack_linear(rows[:20], weight, 0)
    values = values_of(weight, 64)
    assert torch.equal(values[:20], values_of(packed(rows[:20], "q8"), 64))
    assert torch.equal(values[20:], torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType.Q8_0)))


@pytest.mark.parametrize("form", FORMATS)
def test_a_weight_knows_whether_it_is_quantised(form):
    assert Weight(torch.empty(0), 0, form).quantises_rows == (form not in (*FLOAT_FORMATS, "e4m3"))


KINDS = [
    *(Coding("int4", group, zeros=True) for group in (16, 32, 64, 128, 70, 1000)),
    *(Coding("int8", group, zeros=True) for group in (32, 64, 128, 70)),
    *(Coding("int4", group, minima=True) for group in (16, 32, 70)),
    *(Coding(kind, group) for kind in ("e2m1", "iq4") for group in (16, 32, 64, 70)),
    *(Coding("e4m3", group) for group in (70, 128, 256)),
]


@pytest.mark.parametrize("coding", KINDS, ids=str)
def test_coded_rows_keep_their_values(coding):
    rows = coded(randn(37, 70, seed=3), coding)
    form = coded_format(coding, 70)
    weight = empty_weight(37, 70, form, CPU)
    for first, last in ((0, 5), (5, 33), (33, 37)):
        pack_coded(rows.rows(first, last), weight, first)
    expected = rows.values()
    tolerance = 2.0**-10 if form == "int4_min16" else 1e-6
    torch.testing.assert_close(values_of(weight, 70), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_symmetric_codes_need_no_zeros():
    rows = CodedRows(Coding("int8", 32), torch.full((3, 64), 200, dtype=torch.uint8), torch.full((3, 2), 0.5))
    weight = empty_weight(3, 64, "int8_32", CPU)
    pack_coded(rows, weight, 0)
    assert torch.equal(values_of(weight, 64), torch.full((3, 64), 100.0)) and torch.equal(
        rows.values(), values_of(weight, 64)
    )


@pytest.mark.parametrize("coding", [Coding("int4", 24, zeros=True), Coding("e4m3", 32), Coding("int8", 8)], ids=str)
def test_no_format_keeps_codes_whose_groups_cross_its_blocks(coding):
    assert coded_format(coding, 96) is None
    assert coded_format(Coding(coding.kind, 96, coding.zeros), 96) is not None  # one group for all columns


def test_a_nan_among_the_codes_of_e4m3_reaches_its_block_of_columns_and_no_other():
    rows = coded(randn(4, 300, seed=3), Coding("e4m3", 128))
    rows.codes[2, 200] = 0xFF
    weight = empty_weight(4, 300, "e4m3", CPU)
    pack_coded(rows, weight, 0)
    wrong = values_of(weight, 300).isnan()
    assert wrong[2, 128:256].all() and wrong.sum() == 128
