"""The CUDA kernels that read codes, against the values of the coded rows; packing, against the files' own packers."""

import pytest
import torch

from specengine import _C
from specengine.ops.coded import linear as ops
from specengine.ops.coded.linear import coded_linear, coded_linear_argmax, coded_linear_reference, gather_rows
from specengine.ops.coded.rows import CodedRows, Coding
from specengine.ops.coded.weight import FORMS, coded_values, empty_weight, pack_blocks, pack_coded, pack_linear
from specengine.ops.weight import PACKED_BLOCKS, Weight
from tests.backends import cpu_kernels
from tests.ops.cases import randn
from tests.ops.packing import packed, values_of

CPU = torch.device("cpu")
ROWS_OF_X = (1, 7, 8, 16, 33, 64, 100, 256)
TOLERANCE = 1e-5  # tensor cores do not round every sum
# Each kind, with groups, zeros and types of scales that the kernels tell apart: the format and the file's coding.
CODINGS = {
    "q8": Coding("int8", 32, zeros=True),
    "q4": Coding("int4", 32, zeros=True),
    "q4_min": Coding("int4", 32, minima=True),
    "int4_32": Coding("int4", 32, zeros=True),
    "int4_64_bfloat16": Coding("int4", 64, zeros=True),
    "int4_128_float16": Coding("int4", 128, zeros=True),
    "int4_128": Coding("int4", 2000, zeros=True),  # one group
    "int4_min16": Coding("int4", 16, minima=True),
    "int8_32_float16": Coding("int8", 32, zeros=True),
    "int8_128": Coding("int8", 256, zeros=True),
    "e4m3": Coding("e4m3", 128),
    "e2m1_16": Coding("e2m1", 16),
    "e2m1_32": Coding("e2m1", 32),
}
every_format = pytest.mark.parametrize("format", CODINGS)


def coded_rows(format: str, rows: int, columns: int, seed: int = 1) -> CodedRows:
    coding, form, draw = CODINGS[format], FORMS[format], torch.Generator().manual_seed(seed)
    shape, most = (rows, -(-columns // coding.group)), 16 if coding.kind in ("int4", "e2m1") else 256
    codes = torch.randint(0, most, (rows, columns), dtype=torch.uint8, generator=draw)
    if coding.kind == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0x12  # NaN
    dtype = getattr(torch, form.scales)
    scales, minima = ((torch.rand(shape, generator=draw) * 0.02 + 0.001).to(dtype).float() for _ in range(2))
    zeros = torch.randint(0, most, shape, dtype=torch.uint8, generator=draw) if coding.zeros else None
    if form.offset == "middle":
        zeros = torch.full(shape, most // 2, dtype=torch.uint8)
    return CodedRows(coding, codes, scales, zeros, -minima if coding.minima else None)


def weight_of(coded: CodedRows, format: str, device: torch.device = CPU) -> Weight:
    weight = empty_weight(*coded.codes.shape, format, device)
    pack_coded(coded, weight, 0)
    return weight


def x_of(backend, rows: int, columns: int) -> torch.Tensor:
    return backend.put(randn(rows, columns).bfloat16())


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.rows), torch.nan, device=x.device)
    coded_linear(x, weight, bias, out, 0)
    return out


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert (out.double() - expected.double()).norm() <= TOLERANCE * expected.norm()


def slices(coded: CodedRows, begin: int, end: int) -> CodedRows:
    parts = (coded.codes, coded.scales, coded.zeros, coded.minima)
    return CodedRows(coded.coding, *(None if part is None else part[begin:end] for part in parts))


@every_format
def test_packed_rows_have_the_values_of_the_coded_ones(format):
    for rows, columns in ((1, 8), (37, 328), (32, 256)):
        coded = coded_rows(format, rows, columns)
        assert torch.equal(coded_values(weight_of(coded, format), columns), coded.values())
        in_parts = empty_weight(rows, columns, format, CPU)
        for begin, end in ((rows // 3, rows), (0, rows // 3)):
            pack_coded(slices(coded, begin, end), in_parts, begin)
        assert torch.equal(in_parts.data, weight_of(coded, format).data)
        changed = slices(coded, 0, rows)
        changed.codes[0, columns - 1] ^= 1
        assert not torch.equal(coded_values(weight_of(changed, format), columns), coded_values(in_parts, columns))


def test_bytes_stay_near_those_of_the_file():
    for format, bits in (("q4_min", 5), ("int4_128_float16", 4.1875), ("int4_128", 4.3125), ("e4m3", 8.25)):
        assert empty_weight(64, 512, format, CPU).data.nbytes * 8 == bits * 64 * 512


@every_format
def test_the_product_is_that_of_the_rounded_values_and_a_row_does_not_depend_on_the_others(cuda_backend, format):
    for rows, columns, counts in ((37, 328, ROWS_OF_X), (1, 8, (1, 9)), (100, 1160, (1, 16))):
        coded = coded_rows(format, rows, columns)
        weight, bias = weight_of(coded, format, cuda_backend.device), cuda_backend.put(randn(rows, seed=4))
        x = x_of(cuda_backend, max(counts), columns)
        whole = product(x, weight, bias)
        check(whole, coded_linear_reference(x, weight, bias))
        expected = x.double() @ cuda_backend.put(coded.values()).bfloat16().double().T + bias
        check(whole, expected)
        for m in counts[:-1]:
            assert torch.equal(product(x[:m], weight, bias), whole[:m])


def test_values_are_rounded_as_pytorch_rounds_them(cuda_backend):
    """Products with one column each have the bits of the rounded values."""
    for format in CODINGS:
        coded = coded_rows(format, 16, 128)
        weight = weight_of(coded, format, cuda_backend.device)
        found, rounded = product(cuda_backend.put(torch.eye(128)), weight), coded.values().bfloat16().float()
        assert torch.equal(found.cpu(), rounded.T), format
        assert not torch.equal(rounded, coded.values())


@every_format
def test_gathered_rows_are_the_values_and_zeros_for_padding(cuda_backend, format):
    coded = coded_rows(format, 20, 328)
    ids = torch.tensor([3, -1, 0, 19, 3, 2**31 - 1, -(2**31)], dtype=torch.int32, device=cuda_backend.device)
    out = torch.full((7, 328), torch.nan, device=cuda_backend.device)
    gather_rows(weight_of(coded, format, cuda_backend.device), ids, out)
    assert torch.equal(out[[0, 2, 3, 4]].cpu(), coded.values()[[3, 0, 19, 3]])
    assert (out[[1, 5, 6]] == 0).all()


def test_a_nan_scale_poisons_its_row_alone(cuda_backend):
    for format in CODINGS:
        coded = coded_rows(format, 20, 328)
        coded.scales[7, -1] = torch.nan
        out = product(x_of(cuda_backend, 3, 328), weight_of(coded, format, cuda_backend.device))
        assert out[:, 7].isnan().all() and out.isnan().sum() == 3


def test_a_nan_of_e4m3_poisons_its_row_alone(cuda_backend):
    for code in (0x7F, 0xFF):
        coded = coded_rows("e4m3", 20, 328)
        coded.codes[7, 300] = code
        out = product(x_of(cuda_backend, 3, 328), weight_of(coded, "e4m3", cuda_backend.device))
        assert out[:, 7].isnan().all() and out.isnan().sum() == 3


def test_other_columns_of_the_output_stay(cuda_backend):
    coded, x = coded_rows("q4", 20, 64), x_of(cuda_backend, 9, 64)
    weight, bias = weight_of(coded, "q4", cuda_backend.device), cuda_backend.put(randn(30))
    out = torch.full((9, 30), torch.nan, device=x.device)
    coded_linear(x, weight, bias, out, 4)
    check(out[:, 4:24], coded_linear_reference(x, weight, bias[4:24]))
    assert out[:, :4].isnan().all() and out[:, 24:].isnan().all()


@every_format
def test_the_argmax_is_that_of_the_product(cuda_backend, format):
    for rows, m in ((1, 3), (37, 1), (37, 9), (100, 34)):
        weight, x = weight_of(coded_rows(format, rows, 72), format, cuda_backend.device), x_of(cuda_backend, m, 72)
        bias = cuda_backend.put(randn(rows, seed=5)) if rows > 40 else None
        ids = coded_linear_argmax(x, weight, bias)
        assert ids.dtype == torch.int32 and ids.tolist() == product(x, weight, bias).argmax(dim=1).tolist()


def test_ties_go_to_the_lower_id_and_only_finite_maxima_have_one(cuda_backend):
    for count in (1, 16, 17, 200):
        weight = empty_weight(count, 8, "int4_128", cuda_backend.device)
        x, scores = x_of(cuda_backend, 3, 8), randn(count).mul(2).round()
        for values in (torch.zeros(count), scores):
            found = coded_linear_argmax(x, weight, cuda_backend.put(values))
            assert found.tolist() == [int((values == values.max()).nonzero()[0])] * 3
        for bad in (torch.nan, torch.inf):
            scores[count // 2] = bad
            assert coded_linear_argmax(x, weight, cuda_backend.put(scores)).tolist() == [-1] * 3


@pytest.mark.parametrize("kind", PACKED_BLOCKS)
def test_blocks_of_a_file_keep_their_values(cuda_backend, kind):
    quants = pytest.importorskip("gguf.quants")
    if kind == "Q4_K":  # which gguf cannot quantise
        blocks = torch.randint(0, 256, (20, 2, 144), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
        blocks[..., :4] = torch.tensor([0.01, -0.02], dtype=torch.float16).view(torch.uint8)
        file = blocks.flatten(1)
    else:
        file = torch.from_numpy(quants.quantize(randn(20, 512).numpy(), quants.GGMLQuantizationType[kind]))
    weight = empty_weight(20, 512, PACKED_BLOCKS[kind], cuda_backend.device)
    pack_blocks(file.to(cuda_backend.device), weight, 0, kind)
    expected = torch.from_numpy(quants.dequantize(file.numpy(), quants.GGMLQuantizationType[kind]))
    error = (coded_values(weight, 512).cpu() - expected).abs().max()
    assert error <= (1e-3 * expected.abs().max() if kind == "Q4_K" else 0)  # its scales become float16
    x = x_of(cuda_backend, 5, 512)
    check(product(x, weight), x.double() @ coded_values(weight, 512).bfloat16().double().T)


@pytest.mark.parametrize("format", ["q8", "q4_min"])
def test_floats_get_the_codes_that_the_cpu_gives_them(cuda_backend, format):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = randn(37, 72).to(dtype)
        rows[3], rows[4, 5] = 0, -3
        weight = empty_weight(37, 72, format, cuda_backend.device)
        pack_linear(rows.to(cuda_backend.device), weight, 0)
        with cpu_kernels():
            expected = values_of(packed(rows, format), 72)
        assert torch.equal(coded_values(weight, 72).cpu(), expected)
    for bad in (torch.nan, torch.inf, -torch.inf, 3e38):
        rows = randn(3, 72)
        rows[1, 40] = bad
        pack_linear(rows.to(cuda_backend.device), weight := empty_weight(3, 72, format, cuda_backend.device), 0)
        broken = coded_values(weight, 72).isnan().cpu()
        assert broken[1, 32:64].all() and broken.sum() == 32


def test_tables_of_numbers_become_codes_of_eight_bits():
    scales = torch.rand(2, 2).half().float()
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 4)
    coded = CodedRows(Coding("iq4", 32), codes, scales)
    assert torch.equal(coded_values(weight_of(coded, "q8"), 64), coded.values())


def test_what_a_format_cannot_hold_is_refused():
    four, eight = coded_rows("int4_32", 4, 64), coded_rows("q8", 4, 64)
    for coded, format, message in (
        (four, "q8", "coded: q8 holds int8, got int4"),
        (four, "int4_64", "coded: int4_64 holds groups of a multiple of 64 columns, got 32"),
        (four, "q4", "coded: q4 has no zero points other than 8"),
        (four, "q4_min", "coded: q4_min has no zero points"),
        (four, "int4_32_float16", "coded: int4_32_float16 holds scales of float16, which would round these"),
        (coded_rows("q4_min", 4, 64), "q4", "coded: q4 has no minima"),
        (CodedRows(Coding("int8", 32), eight.codes, eight.scales), "q8", "coded: q8 has no codes without zero points"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            pack_coded(coded, empty_weight(4, 64, format, CPU), 0)
    with pytest.raises(ValueError, match=r"^first: 4 rows from 1 on do not fit in 4 rows$"):
        pack_coded(four, empty_weight(4, 64, "int4_32", CPU), 1)
    with pytest.raises(ValueError, match=r"^rows: 64 columns do not fill 2 chunks of 128$"):
        pack_coded(four, empty_weight(4, 200, "int4_32", CPU), 0)
    with pytest.raises(ValueError, match=r"^weight: floats are quantised to q8 or q4_min, got int4_32$"):
        pack_linear(randn(4, 64), empty_weight(4, 64, "int4_32", CPU), 0)
    with pytest.raises(ValueError, match=r"^type: expected Q8_0, Q4_0, Q4_1, Q4_K, got 'Q5_0'$"):
        pack_blocks(torch.zeros(1, 22, dtype=torch.uint8), empty_weight(1, 32, "q8", CPU), 0, "Q5_0")


def test_what_the_kernels_cannot_read_is_refused_by_name(cuda_backend):
    def arguments(columns=64) -> dict:
        weight = weight_of(coded_rows("int4_32", 20, columns), "int4_32", cuda_backend.device)
        x, out = x_of(cuda_backend, 3, columns), torch.full((3, 20), torch.nan, device=cuda_backend.device)
        rest = {"bias": None, "out": out, "first": 0, "rows": 20}
        return {"x": x, "weight": weight.data, "form": FORMS["int4_32"], **rest}

    good = arguments()
    form = good["form"]._asdict()
    shifted = torch.zeros(3 * 64 + 1, dtype=torch.bfloat16, device=cuda_backend.device)[1:].view(3, 64)
    for changes, message in (
        ({"x": x_of(cuda_backend, 3, 12)}, "x: expected a multiple of 8 columns, at most 16777216, got 12"),
        ({"x": good["x"].float()}, "x: expected dtype bfloat16, got float32"),
        ({"x": good["x"].half()}, "x: expected dtype bfloat16, got float16"),
        ({"x": shifted}, "x: expected memory aligned to 16 bytes"),
        ({"x": x_of(cuda_backend, 3, 136)}, r"weight: expected shape \[P, C/128, 1344\] with C/128=2 \(from x\)"),
        ({"weight": good["weight"].float()}, "weight: expected dtype uint8, got float32"),
        ({"form": _C.CodedForm(**form | {"kind": "int3"})}, "form: expected kind int4, int8, e4m3 or e2m1, got 'int3'"),
        ({"form": _C.CodedForm(**form | {"group": 48})}, "form: expected a group of 16, 32, 64 or 128 columns, got 48"),
        (
            {"form": _C.CodedForm(**form | {"scales": "int8"})},
            "form: expected scales float32, float16 or bfloat16,",
        ),
        ({"form": _C.CodedForm(**form | {"offset": "no"})}, "form: expected offset none, middle, zeros or minima, got"),
        ({"form": _C.CodedForm("e4m3", 32, "float32", "zeros")}, "form: e4m3 has no zeros"),
        ({"form": _C.CodedForm("int8", 32, "float32", "minima")}, "form: int8 has no minima"),
        ({"form": _C.CodedForm(**form | {"group": 16})}, r"weight: expected shape \[P, C/128, 1664\]"),
        *(({"rows": rows}, f"rows: {rows} rows do not match 2 panels of 16") for rows in (-1, 16, 33)),
        ({"first": 1}, "first: 20 columns from 1 on are not in out's N=20"),
        ({"bias": torch.zeros(19, device=cuda_backend.device)}, r"bias: expected shape \[N\]"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            ops._C.coded_linear(**{**good, **changes})
    assert good["out"].isnan().all()
    ids, keys = (torch.zeros(3, dtype=dtype, device=cuda_backend.device) for dtype in (torch.int32, torch.int64))
    head = {name: good[name] for name in ("x", "weight", "form", "bias")} | {"ids": ids, "keys": keys}
    with pytest.raises(ValueError, match=r"^rows: 16 rows do not match"):
        ops._C.coded_linear_argmax(**head, rows=16)
    with pytest.raises(ValueError, match=r"^ids: expected dtype int32, got int64"):
        ops._C.coded_linear_argmax(**head | {"ids": keys}, rows=20)
    with pytest.raises(ValueError, match=r"^weight: expected shape \[P, C/128, 1344\]"):
        ops._C.gather_coded(good["weight"], good["form"], ids, torch.zeros(3, 136, device=cuda_backend.device))


def test_empty_sizes(cuda_backend):
    for m, rows, columns in ((0, 20, 64), (3, 0, 64), (3, 20, 0)):
        weight = empty_weight(rows, columns, "int4_32", cuda_backend.device)
        assert torch.equal(product(x_of(cuda_backend, m, columns), weight).cpu(), torch.zeros(m, rows))
