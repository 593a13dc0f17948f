"""The CUDA kernels of experts: the CPU's routing to the bit, products against float64, rows in any company."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from specengine import _C
from specengine.ops import cuda_ops
from specengine.ops.coded.weight import FORMS, coded_values, empty_weight, pack_linear
from specengine.ops.experts import moe as experts
from specengine.ops.experts.moe import ExpertProjection, Groups, Moe, Routing
from specengine.ops.weight import FLOAT_FORMATS, Weight
from tests.backends import cpu_kernels
from tests.ops.cases import randn

TOLERANCE = {"float32": 1e-6, **dict.fromkeys(("float16", "bfloat16", "q8", "q4_min"), 1e-5)}  # of tensor cores
EVERY_PLAN = (1, 10, 20, 70)  # rows that 3 experts take by 2: tiles of 8, 16, 32 and 64 places

every_format = pytest.mark.parametrize("format", TOLERANCE)
every_float = pytest.mark.parametrize("format", FLOAT_FORMATS)


def projection(backend, values, format, bias=None):
    """values: float32 [E, N, C]. Rows between two experts hold NaN, which nothing may read."""
    count, rows, columns = values.shape
    stride = -(-rows // _C.PANEL) * _C.PANEL
    data = torch.full((count, stride, columns), torch.nan)
    data[:, :rows] = values
    flat = backend.put(data.view(-1, columns))
    if format in FORMS:
        weight = empty_weight(len(flat), columns, format, backend.device)
        pack_linear(flat, weight, 0)
    else:
        weight = Weight(flat.to(FLOAT_FORMATS[format]), len(flat), format)
    return ExpertProjection((weight,), (rows,), None if bias is None else backend.put(bias))


def product_of(x, layer, groups, gathers):
    """The product of expert_linear_cuda in float64."""
    (weight,), (rows,) = layer.weights, layer.rows
    starts = groups.starts.tolist()
    x = x.to(weight.row_dtype).double()
    values = coded_values(weight, x.shape[1]).to(weight.row_dtype) if weight.format in FORMS else weight.data
    x = x[groups.rows.long()] if gathers else x
    out = torch.zeros(len(groups.rows), rows, dtype=torch.float64, device=x.device)
    for expert, (first, last) in enumerate(pairwise(starts)):
        own = values.view(len(starts) - 1, -1, x.shape[1])[expert, :rows].double()
        out[first:last] = x[first:last] @ own.T + (0 if layer.bias is None else layer.bias[expert].double())
    return out


def groups_of(backend, rows, count, per_token, seed=0):
    """A random routing; rows of one seed are sent to the same experts, however many there are."""
    order = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(count, generator=order)[:per_token] for _ in range(rows)]).int()
    return experts.group_pairs(backend.put(chosen), count)


def routed(backend, x, moe):
    """The logits and the routing of rows."""
    logits = backend.put(torch.full((len(x), moe.experts), torch.nan))
    chosen = backend.put(torch.full((len(x), moe.per_token), -1, dtype=torch.int32))
    weights = backend.put(torch.full((len(x), moe.per_token), torch.nan))
    gate, scale = moe.shared_gate, backend.put(torch.full((len(x),), torch.nan))
    scale = None if gate is None else scale
    experts._C.route_rows(x, moe.router, moe.router_bias, gate, logits, chosen, weights, scale, moe.renormalise)
    return logits, Routing(chosen, weights, scale)


def moe_of(backend, format="float32", count=9, per_token=3, hidden=72, inner=40, shared=False, renormalise=True):
    return Moe(
        router=backend.put((randn(count, hidden) / 8).to(FLOAT_FORMATS.get(format, torch.bfloat16))),
        router_bias=backend.put(randn(count, seed=2) / 8),
        shared_gate=backend.put(randn(hidden, seed=3) / 8) if shared else None,
        per_token=per_token,
        renormalise=renormalise,
        intermediate=inner,
        gate_up=projection(backend, randn(count, 2 * inner, hidden, seed=4) / 8, format),
        down=projection(backend, randn(count, hidden, inner, seed=5) / 8, format),
    )


def on_cpu(moe):
    """The router's part of a layer where the CPU's kernels read it."""
    parts = {name: getattr(moe, name) for name in ("router", "router_bias", "shared_gate")}
    return replace(moe, **{name: None if part is None else part.cpu() for name, part in parts.items()})


@every_float
@pytest.mark.parametrize("renormalise", [True, False])
def test_logits_and_choices_are_those_of_the_cpu_to_the_bit(cuda_backend, format, renormalise):
    for count, per_token, hidden in ((4, 2, 32), (9, 3, 72), (128, 8, 100), (33, 32, 7), (300, 32, 8)):
        moe = moe_of(cuda_backend, format, count, per_token, hidden, 8, shared=True, renormalise=renormalise)
        x = randn(11, hidden, seed=count)
        logits, found = routed(cuda_backend, cuda_backend.put(x), moe)
        with cpu_kernels():
            expected_logits, expected = routed(replace(cuda_backend, device=torch.device("cpu")), x, on_cpu(moe))
        assert torch.equal(logits.cpu(), expected_logits)
        assert torch.equal(found.experts.cpu(), expected.experts)
        torch.testing.assert_close(found.weights.cpu(), expected.weights, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(found.shared_scale.cpu(), expected.shared_scale, rtol=2e-6, atol=1e-7)


def test_a_row_is_routed_as_it_is_alone(cuda_backend):
    moe, x = moe_of(cuda_backend, "bfloat16", 33, 5, shared=True), cuda_backend.put(randn(9, 72))
    whole = experts.route_rows(x, moe)
    for row in range(len(x)):
        alone = experts.route_rows(x[row : row + 1], moe)
        for name in ("experts", "weights", "shared_scale"):
            assert torch.equal(getattr(alone, name)[0], getattr(whole, name)[row]), name


def test_equal_logits_go_to_the_lower_expert_and_a_nan_poisons_its_row_alone(cuda_backend):
    moe = moe_of(cuda_backend, count=70, per_token=4)
    bias = torch.zeros(70)
    bias[[1, 33, 65]], bias[2] = 1, -0.0
    equal = replace(moe, router=torch.zeros_like(moe.router), router_bias=cuda_backend.put(bias))
    x = cuda_backend.put(randn(2, 72))
    assert experts.route_rows(x, equal).experts.tolist() == [[1, 33, 65, 0]] * 2
    expected = experts.route_rows(x, moe)
    x[0] = torch.nan
    broken = experts.route_rows(x, moe)
    assert broken.experts[0].tolist() == [0, 1, 2, 3] and broken.weights[0].isnan().all()
    assert torch.equal(broken.weights[1], expected.weights[1])


def test_pairs_are_grouped_as_by_the_reference(cuda_backend):
    for rows, per_token, count in ((0, 3, 5), (1, 1, 1), (1, 3, 5), (40, 4, 7), (3, 2, 900)):
        chosen = torch.stack([torch.randperm(count)[:per_token] for _ in range(rows)] or [torch.empty(0, per_token)])
        chosen = chosen.view(rows, per_token).int()
        found = experts.group_pairs(cuda_backend.put(chosen), count)
        expected = experts.group_pairs_reference(chosen, count)
        for name in ("starts", "rows", "places"):
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


@every_format
@pytest.mark.parametrize("gathers", [True, False])
def test_products_of_experts_are_the_products_and_the_biases(cuda_backend, format, gathers):
    for rows, columns, biased in ((1, 8, True), (15, 64, False), (37, 136, True), (100, 72, False)):
        bias = randn(3, rows, seed=6) if biased else None
        layer = projection(cuda_backend, randn(3, rows, columns, seed=3), format, bias)
        for count in EVERY_PLAN:
            groups = groups_of(cuda_backend, count, 3, 2, seed=rows)
            x = cuda_backend.put(randn(count if gathers else len(groups.rows), columns))
            out, expected = experts.expert_linear_cuda(x, layer, groups, gathers), product_of(x, layer, groups, gathers)
            assert (out.double() - expected).norm() <= TOLERANCE[format] * expected.norm()


@every_format
def test_a_row_has_the_same_bits_in_any_company(cuda_backend, format):
    """Its product by an expert is the same however many rows that expert has, and whatever they are."""
    layer, x = projection(cuda_backend, randn(3, 37, 328, seed=3), format), cuda_backend.put(randn(256, 328))

    def by_pair(x, groups):
        return experts.expert_linear_cuda(x, layer, groups, True)[groups.places.long()]

    everything = by_pair(x, groups_of(cuda_backend, 256, 3, 2))
    for count in (*EVERY_PLAN, 2, 37):
        assert torch.equal(by_pair(x[:count], groups_of(cuda_backend, count, 3, 2)), everything[:count])
    spoiled = x.clone()
    spoiled[::2] = torch.nan
    assert torch.equal(by_pair(spoiled, groups_of(cuda_backend, 256, 3, 2))[1::2], everything[1::2])


@pytest.mark.parametrize("count", [5, 70, 300])
def test_all_rows_may_be_sent_to_one_expert_and_experts_may_have_none(cuda_backend, count):
    layer = projection(cuda_backend, randn(count, 20, 64, seed=3), "bfloat16")
    for rows in (1, 9, 70):
        for expert in (0, count // 2, count - 1):
            chosen = cuda_backend.put(torch.full((rows, 1), expert, dtype=torch.int32))
            groups, x = experts.group_pairs(chosen, count), cuda_backend.put(randn(rows, 64))
            out, expected = experts.expert_linear_cuda(x, layer, groups, True), product_of(x, layer, groups, True)
            assert (out.double() - expected).norm() <= TOLERANCE["bfloat16"] * expected.norm()


def test_several_weights_write_their_columns_of_one_output(cuda_backend):
    parts = [
        projection(cuda_backend, randn(3, rows, 64, seed=rows), format) for rows, format in ((20, "float16"), (9, "q8"))
    ]
    bias = cuda_backend.put(randn(3, 29))
    weights = tuple(weight for part in parts for weight in part.weights)
    groups, x = groups_of(cuda_backend, 10, 3, 2), cuda_backend.put(randn(10, 64))
    out = experts.expert_linear_cuda(x, ExpertProjection(weights, (20, 9), bias), groups, True)
    for part, columns in zip(parts, (slice(0, 20), slice(20, 29)), strict=True):
        own = experts.expert_linear_cuda(x, replace(part, bias=bias[:, columns].contiguous()), groups, True)
        assert torch.equal(out[:, columns], own)


def test_slots_are_added_with_the_bits_of_the_cpu(cuda_backend):
    for columns in (5, 8, 72, 1030):
        groups = groups_of(cuda_backend, 5, 9, 3)
        y, shared = randn(15, columns), randn(5, columns, seed=2)
        weights, scale = randn(5, 3, seed=3), randn(5, seed=4)
        for given, scaled in ((None, None), (shared, None), (shared, scale)):
            put = [None if each is None else cuda_backend.put(each) for each in (given, scaled)]
            routing = Routing(groups.places, cuda_backend.put(weights), put[1])
            found = experts.combine_experts(cuda_backend.put(y), groups, routing, put[0])
            own = Groups(*(getattr(groups, name).cpu() for name in ("starts", "rows", "places")))
            with cpu_kernels():
                expected = experts.combine_experts(y, own, Routing(own.places, weights, scaled), given)
            assert torch.equal(found.cpu(), expected)


@every_format
def test_a_layer_of_experts_is_that_of_the_reference(cuda_backend, format):
    ops = cuda_ops(cuda_backend.device).layer.experts
    moe = moe_of(cuda_backend, format, shared=True)
    x, shared = (cuda_backend.put(randn(20, 72, seed=seed)) for seed in (1, 2))
    out = ops(x, moe, shared)
    groups = experts.group_pairs(experts.route_rows(x, moe).experts, moe.experts)
    gate, up = product_of(x, moe.gate_up, groups, True).float().chunk(2, dim=1)
    y = product_of(torch.nn.functional.silu(gate) * up, moe.down, groups, False).float()
    expected = experts.combine_experts_reference(y, groups, experts.route_rows(x, moe), shared)
    limit = {"float32": 1e-6, "float16": 1e-3}.get(format, 1e-2)  # of the rounding between two products
    assert (out - expected).norm() <= limit * expected.norm()
    for row in range(len(x)):
        assert torch.equal(ops(x[row : row + 1], moe, shared[row : row + 1])[0], out[row])


def test_what_the_kernels_cannot_read_is_refused_by_name(cuda_backend):
    layer, groups = projection(cuda_backend, randn(3, 20, 64), "bfloat16"), groups_of(cuda_backend, 5, 3, 2)
    x = cuda_backend.put(randn(5, 64))
    with pytest.raises(ValueError, match=r"rows: 48 rows do not match the weight's 96"):
        experts.expert_linear_cuda(x, replace(layer, rows=(16,)), groups, True)
    with pytest.raises(ValueError, match=r"x: expected dtype bfloat16, got float32"):
        experts.expert_linear(x, layer, groups, True)
    coded = projection(cuda_backend, randn(3, 20, 64), "q8")
    with pytest.raises(ValueError, match=r"rows: 48 rows do not match 6 panels of 16"):
        experts.expert_linear_cuda(x, replace(coded, rows=(16,)), groups, True)
    with pytest.raises(ValueError, match="out: expected x's 5 rows where no rows are given, got 10"):
        experts.expert_linear_cuda(x, coded, groups, False)
    with pytest.raises(ValueError, match="out: expected x's 5 rows where no rows are given, got 10"):
        experts.expert_linear_cuda(x, layer, groups, False)
    with pytest.raises(ValueError, match="weight: expected a multiple of 8 columns"):
        narrow = projection(cuda_backend, randn(3, 20, 12), "bfloat16")
        experts.expert_linear_cuda(cuda_backend.put(randn(5, 12)), narrow, groups, True)
