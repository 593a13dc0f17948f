"""The CUDA kernels of linear, linear_argmax and gather_rows, against plain arithmetic in float64."""

import pytest
import torch

from specengine.ops import linear as linear_ops
from specengine.ops.autotune import VARIANTS, LinearChoices
from specengine.ops.linear import LIBRARY, Projection, linear_argmax_cuda, linear_cuda
from specengine.ops.row_tools import FixedRows, take_rows
from specengine.ops.weight import FLOAT_FORMATS, Weight, gather_rows
from tests.ops.cases import randn

DTYPES = tuple(FLOAT_FORMATS.values())
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-5, torch.bfloat16: 1e-5}  # tensor cores do not round every sum
EVERY_VARIANT = (0, *VARIANTS.values())

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=FLOAT_FORMATS)
every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)


class Always:
    """Choices that are always the same."""

    def __init__(self, way: int) -> None:
        self.way = way

    def choose(self, weight: torch.Tensor, rows: int) -> int:
        return self.way


def layer_of(cuda_backend, rows, columns, dtype, *, bias=False, parts=1) -> Projection:
    formats = {value: name for name, value in FLOAT_FORMATS.items()}
    weights = [randn(rows, columns, seed=3 + i).to(dtype).to(cuda_backend.device) for i in range(parts)]
    return Projection(
        tuple(Weight(data, rows, formats[dtype]) for data in weights),
        randn(rows * parts, seed=2).to(cuda_backend.device) if bias else None,
    )


def rows_of(cuda_backend, rows, columns, dtype, seed=1) -> torch.Tensor:
    return randn(rows, columns, seed=seed).to(dtype).to(cuda_backend.device)


def expected_of(x: torch.Tensor, layer: Projection) -> torch.Tensor:
    out = x.double() @ torch.cat([weight.data for weight in layer.weights]).double().T
    return out if layer.bias is None else out + layer.bias.double()


def check(out: torch.Tensor, x: torch.Tensor, layer: Projection) -> None:
    expected = expected_of(x, layer)
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert (out.double() - expected).norm() <= TOLERANCE[x.dtype] * expected.norm()


@every_dtype
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("columns", [8, 64, 136, 576])
def test_linear_is_the_product_and_the_bias(cuda_backend, dtype, rows, columns):
    for m, bias in ((1, True), (8, False), (9, False), (33, True), (64, True)):
        layer, x = layer_of(cuda_backend, rows, columns, dtype, bias=bias), rows_of(cuda_backend, m, columns, dtype)
        check(linear_cuda(x, layer, Always(0)), x, layer)


@every_dtype
@every_variant
def test_every_variant_is_the_product(cuda_backend, dtype, variant):
    layer = layer_of(cuda_backend, 70, 576, dtype)
    for m in (3, 16, 17, 40, 70):
        x = rows_of(cuda_backend, m, 576, dtype)
        check(linear_cuda(x, layer, Always(variant)), x, layer)


@every_dtype
@every_variant
def test_a_weight_of_a_real_size(cuda_backend, dtype, variant):
    layer, x = layer_of(cuda_backend, 576, 1536, dtype), rows_of(cuda_backend, 2, 1536, dtype)
    check(linear_cuda(x, layer, Always(variant)), x, layer)


@every_dtype
@every_variant
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows(cuda_backend, dtype, variant):
    layer, x = layer_of(cuda_backend, 37, 328, dtype), rows_of(cuda_backend, 70, 328, dtype)
    everything = linear_cuda(x, layer, Always(variant))
    for m in (1, 2, 7, 8, 9, 33, 64):
        assert torch.equal(linear_cuda(x[:m], layer, Always(variant)), everything[:m])
    order = torch.arange(69, -1, -1, device=x.device)
    assert torch.equal(linear_cuda(x[order], layer, Always(variant)), everything[order])
    spoiled = x.clone()
    spoiled[::2], spoiled[1::4] = torch.nan, torch.inf
    assert torch.equal(linear_cuda(spoiled, layer, Always(variant))[3::4], everything[3::4])


@every_dtype
def test_variants_of_as_many_warps_give_the_same_bits(cuda_backend, dtype):
    layer, x = layer_of(cuda_backend, 70, 328, dtype), rows_of(cuda_backend, 9, 328, dtype)
    by_warps = {}
    for name, variant in VARIANTS.items():
        out = linear_cuda(x, layer, Always(variant))
        assert torch.equal(out, by_warps.setdefault(name.partition("x")[2], out))
    assert len(by_warps) < len(VARIANTS)


@every_dtype
def test_infinities_and_nans_pass_through(cuda_backend, dtype):
    layer, x = layer_of(cuda_backend, 20, 72, dtype), rows_of(cuda_backend, 5, 72, dtype)
    x[1, 3], x[2, 71], layer.weights[0].data[7, 40] = torch.inf, torch.nan, -torch.inf
    out, expected = linear_cuda(x, layer, Always(0)), expected_of(x, layer).float()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out[out.isinf()], expected[expected.isinf()])


@every_dtype
@pytest.mark.parametrize("variant", [0, LIBRARY])
def test_several_weights_write_their_columns_of_one_output(cuda_backend, dtype, variant):
    layer, x = layer_of(cuda_backend, 24, 64, dtype, bias=True, parts=3), rows_of(cuda_backend, 5, 64, dtype)
    check(linear_cuda(x, layer, Always(variant)), x, layer)


def test_an_output_outside_the_written_columns_is_left_alone(cuda_backend):
    layer, x = layer_of(cuda_backend, 20, 64, torch.bfloat16), rows_of(cuda_backend, 9, 64, torch.bfloat16)
    bias, out = randn(30).to(x.device), torch.full((9, 30), torch.nan, device=x.device)
    linear_ops._C.linear(x, layer.weights[0].data, bias, out, 4, 20, 0, None)
    check(out[:, 4:24], x, Projection(layer.weights, bias[4:24]))
    assert out[:, :4].isnan().all() and out[:, 24:].isnan().all()


def test_rows_are_rounded_to_the_weights_dtype(cuda_backend):
    layer, x = layer_of(cuda_backend, 20, 64, torch.bfloat16), randn(3, 64).to(cuda_backend.device)
    check(linear_cuda(x, layer, Always(0)), x.bfloat16(), layer)


@pytest.mark.parametrize("m, rows, columns", [(0, 20, 64), (3, 0, 64), (3, 20, 0)])
def test_empty_sizes(cuda_backend, m, rows, columns):
    layer, x = layer_of(cuda_backend, rows, columns, torch.float16), rows_of(cuda_backend, m, columns, torch.float16)
    assert torch.equal(linear_cuda(x, layer, Always(0)), torch.zeros(m, rows, device=x.device))


@every_dtype
@every_variant
def test_linear_argmax_is_the_argmax_of_linear(cuda_backend, dtype, variant):
    for rows, m in ((1, 3), (37, 1), (37, 9), (100, 34)):
        layer, x = layer_of(cuda_backend, rows, 72, dtype, bias=rows > 40), rows_of(cuda_backend, m, 72, dtype)
        ids = linear_argmax_cuda(x, layer, Always(variant))
        assert ids.dtype == torch.int32
        assert ids.tolist() == linear_cuda(x, layer, Always(variant)).argmax(dim=1).tolist()


def argmax_of(cuda_backend, scores: torch.Tensor, rows: int = 1, way: int = 0) -> list[int]:
    """linear_argmax_cuda where the scores of each row are these: the bias of a weight of zeros."""
    weight = torch.zeros(len(scores), 8, device=cuda_backend.device)
    layer = Projection((Weight(weight, len(scores), "float32"),), scores.to(cuda_backend.device))
    return linear_argmax_cuda(torch.ones(rows, 8, device=cuda_backend.device), layer, Always(way)).tolist()


@pytest.mark.parametrize("way", (*EVERY_VARIANT, LIBRARY))
def test_ties_go_to_the_lower_id(cuda_backend, way):
    for count in (1, 16, 17, 200):
        assert argmax_of(cuda_backend, torch.zeros(count), 3, way) == [0, 0, 0]
        scores = randn(count).mul(2).round()
        assert argmax_of(cuda_backend, scores, 2, way) == [int((scores == scores.max()).nonzero()[0])] * 2
    scores = torch.full((200,), -1.0)
    scores[[130, 17, 199]] = 2.0
    assert argmax_of(cuda_backend, scores, 1, way) == [17]
    scores = torch.full((200,), -1.0)
    scores[130], scores[60] = 0.0, -0.0
    assert argmax_of(cuda_backend, scores, 1, way) == [60]


@pytest.mark.parametrize("way", [0, LIBRARY])
@pytest.mark.parametrize("place", [0, 5, 16, 36])
def test_scores_without_a_finite_maximum_have_no_argmax(cuda_backend, place, way):
    scores = randn(37)
    best = int(scores.argmax())
    for bad in (torch.nan, -torch.nan, torch.inf):
        poisoned = scores.clone()
        poisoned[place] = bad
        assert argmax_of(cuda_backend, poisoned, 2, way) == [-1, -1]
    masked = scores.clone()
    masked[[i for i in range(37) if i != best and i % 3 == place % 3]] = -torch.inf
    assert argmax_of(cuda_backend, masked, 1, way) == [best]
    masked[:] = -torch.inf
    assert argmax_of(cuda_backend, masked, 1, way) == [-1]
    masked[place] = -3e38
    assert argmax_of(cuda_backend, masked, 1, way) == [place]


@every_dtype
def test_gather_rows_gives_the_rows_and_zeros_for_padding(cuda_backend, dtype):
    (weight,) = layer_of(cuda_backend, 20, 328, dtype).weights
    ids = torch.tensor([3, -1, 0, 19, 3, 20, -(2**31), 2**31 - 1], dtype=torch.int32, device=cuda_backend.device)
    out = torch.full((8, 328), torch.nan, device=cuda_backend.device)
    gather_rows(weight, ids, out)
    assert torch.equal(out[[0, 2, 3, 4]], weight.data[[3, 0, 19, 3]].float())
    assert (out[[1, 5, 6, 7]] == 0).all()
    wide = torch.full_like(out, torch.nan)
    gather_rows(weight, ids.long(), wide)
    assert torch.equal(wide, out)


@every_dtype
def test_rows_are_taken_by_numbers_of_the_host_or_the_device(cuda_backend, dtype):
    rows, fixed = cuda_backend.put(randn(6, 2, 8)), FixedRows()
    for picked in ([4, 0, 4], [2]):
        expected = rows[picked].to(dtype)
        numbers = torch.tensor(picked, device=cuda_backend.device)
        for found in (
            take_rows(rows, numbers, dtype),
            take_rows(rows, numbers.int(), dtype),
            fixed.take(rows, picked, dtype),
            fixed.take(rows, picked, dtype),
        ):
            assert torch.equal(found, expected) and found.dtype == dtype
    assert torch.equal(take_rows(rows, [1, 3]), rows[[1, 3]])
    assert take_rows(rows, torch.zeros(0, dtype=torch.int64, device=cuda_backend.device)).shape == (0, 2, 8)


def test_a_product_may_write_to_a_tensor_of_its_caller(cuda_backend):
    layer = layer_of(cuda_backend, 40, 24, torch.bfloat16, bias=True)
    x, out = rows_of(cuda_backend, 3, 24, torch.float32), torch.full((3, 40), torch.nan, device=cuda_backend.device)
    assert linear_cuda(x, layer, Always(0), out=out) is out
    assert torch.equal(out, linear_cuda(x.bfloat16(), layer, Always(0)))


def test_only_a_device_is_measured_and_what_it_chooses_is_the_product(cuda_backend, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    layer = layer_of(cuda_backend, 70, 136, torch.bfloat16, bias=True)
    for strict in (False, True):
        choices = LinearChoices(cuda_backend.device, strict=strict)
        choices.tune(layer)
        assert bool(choices.report()["chosen"]) == (cuda_backend.name == "gpu")
        for m in (1, 9, 64, 65):
            x = rows_of(cuda_backend, m, 136, torch.bfloat16)
            check(linear_cuda(x, layer, choices), x, layer)


@pytest.mark.parametrize("cuda_backend", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("way", [0, LIBRARY])
def test_a_captured_graph_gives_the_same_bits(cuda_backend, way):
    layer, x = layer_of(cuda_backend, 100, 136, torch.bfloat16), rows_of(cuda_backend, 9, 136, torch.bfloat16)
    expected = linear_cuda(x, layer, Always(way)), linear_argmax_cuda(x, layer, Always(way))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear_cuda(x, layer, Always(way)), linear_argmax_cuda(x, layer, Always(way))
    for _ in range(2):
        for out in captured:
            out.fill_(-77)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))


def test_what_the_kernels_cannot_read_is_refused_by_name(cuda_backend):
    def arguments(columns=64, dtype=torch.bfloat16):
        weight, x = layer_of(cuda_backend, 20, columns, dtype).weights[0].data, rows_of(cuda_backend, 3, columns, dtype)
        out = torch.full((3, 20), torch.nan, device=x.device)
        return {"x": x, "weight": weight, "bias": None, "out": out, "first": 0, "rows": 20, "variant": 0, "masks": None}

    good = arguments()
    panels = torch.zeros(2, 64, 16, dtype=torch.bfloat16, device=cuda_backend.device)
    codes = torch.zeros(2, 2, 544, dtype=torch.uint8, device=cuda_backend.device)
    shifted = torch.zeros(3 * 64 + 1, dtype=torch.bfloat16, device=cuda_backend.device)[1:].view(3, 64)
    last = len(VARIANTS)
    for changes, message in (
        (arguments(columns=12), "weight: expected a multiple of 8 columns"),
        ({"weight": panels}, r"weight: expected shape \[N, C\], got \[2, 64, 16\]"),
        ({"weight": codes}, "weight: expected dtype float32 or float16 or bfloat16, got uint8"),
        ({"x": good["x"].float()}, "x: expected dtype bfloat16, got float32"),
        ({"x": shifted}, "x: expected memory aligned to 16 bytes"),
        ({"rows": 19}, "rows: 19 rows do not match the weight's 20"),
        ({"rows": -1}, "rows: -1 "),
        ({"first": 1}, "first: 20 columns from 1 on are not in out's N=20"),
        *(({"variant": variant}, f"variant: expected 0 to {last}, got {variant}") for variant in (-1, last + 1)),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            linear_ops._C.linear(**{**good, **changes})
    assert good["out"].isnan().all()
    with pytest.raises(ValueError, match=r"^weight: expected shape \[N, C\].*, got \[2, 64, 16\]"):
        linear_ops._C.gather_rows(
            panels, torch.zeros(3, dtype=torch.int32, device=cuda_backend.device), good["x"].float()
        )
