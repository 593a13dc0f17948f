"""The ops of a mixture of experts against their references, and rows whose bits no other row changes."""

from dataclasses import replace

import pytest
import torch

from specengine import _C
from specengine.ops import linear, native, weight
from specengine.ops.experts import moe as experts
from specengine.ops.experts.moe import ExpertProjection, Moe

CPU = torch.device("cpu")
FORMATS = ("float32", "bfloat16", "q8", "q4_min")


def projection(values, form, bias=None):
    """values: float32 [E, N, C]; each expert begins a panel."""
    count, rows, columns = values.shape
    stride = -(-rows // _C.PANEL) * _C.PANEL
    packed = weight.empty_weight(count * stride, columns, form, CPU)
    for expert in range(count):
        weight.pack_linear(values[expert].contiguous(), packed, expert * stride)
    return ExpertProjection((packed,), (rows,), bias)


def reference_of(layer, columns):
    """The same product in float32, from the packed weight's own values."""
    (packed,), (rows,) = layer.weights, layer.rows
    values = torch.empty(packed.rows, columns)
    weight.gather_rows(packed, torch.arange(packed.rows, dtype=torch.int32), values)
    stride = -(-rows // _C.PANEL) * _C.PANEL
    own = values.view(-1, stride, columns)[:, :rows].reshape(-1, columns).contiguous()
    return ExpertProjection((weight.Weight(own, len(own), "float32"),), (rows,), layer.bias)


def small_moe(form="float32", seed=0, count=9, per_token=3, hidden=72, inner=40, shared=False, renormalise=True):
    torch.manual_seed(seed)
    return Moe(
        router=torch.randn(count, hidden) / 8,
        router_bias=torch.randn(count) / 8,
        shared_gate=torch.randn(hidden) / 8 if shared else None,
        per_token=per_token,
        renormalise=renormalise,
        intermediate=inner,
        gate_up=projection(torch.randn(count, 2 * inner, hidden) / 8, form),
        down=projection(torch.randn(count, hidden, inner) / 8, form),
    )


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_routing_is_that_of_the_reference(dtype, renormalise):
    for count, per_token, hidden in ((4, 2, 32), (9, 3, 72), (128, 8, 100), (33, 32, 7)):
        moe = small_moe(count=count, per_token=per_token, hidden=hidden, shared=True, renormalise=renormalise)
        moe = replace(moe, router=moe.router.to(dtype))
        x = torch.randn(11, hidden)
        found, expected = experts.route_rows(x, moe), experts.route_rows_reference(x, moe)
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(found.shared_scale, expected.shared_scale, rtol=2e-6, atol=1e-7)
        assert renormalise == bool((found.weights.sum(1) > 0.999).all()) or per_token == count


def test_equal_logits_go_to_the_lower_expert_and_a_nan_chooses_valid_experts():
    moe = small_moe(count=6, per_token=4)
    equal = replace(moe, router=torch.zeros_like(moe.router), router_bias=torch.tensor([0, 1, 0, 1, 0, 1.0]))
    assert experts.route_rows(torch.randn(2, 72), equal).experts.tolist() == [[1, 3, 5, 0]] * 2
    broken = experts.route_rows(torch.full((1, 72), float("nan")), moe)
    assert sorted(broken.experts[0].tolist()) == [0, 1, 2, 3] and broken.weights.isnan().all()


def test_pairs_are_grouped_by_expert_and_row():
    for rows, per_token, count in ((1, 1, 1), (1, 3, 5), (40, 4, 7), (3, 2, 900)):
        chosen = torch.stack([torch.randperm(count)[:per_token] for _ in range(rows)]).int()
        found, expected = experts.group_pairs(chosen, count), experts.group_pairs_reference(chosen, count)
        for name in ("starts", "rows", "places"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("form", FORMATS)
def test_products_of_experts_are_those_of_the_reference(form):
    moe = small_moe(form)
    bias = torch.randn(9, 80)
    layer = ExpertProjection(moe.gate_up.weights, moe.gate_up.rows, bias)
    x = torch.randn(13, 72)
    groups = experts.group_pairs(experts.route_rows(x, moe).experts, 9)
    found = experts.expert_linear(linear.rows_for(x, layer), layer, groups, True)
    expected = experts.expert_linear_reference(x, reference_of(layer, 72), groups, True)
    assert (found - expected).std() < (2e-2 if layer.quantises_rows else 1e-5) * expected.std()
    placed = linear.rows_for(x[groups.rows.long()], layer)
    assert torch.equal(experts.expert_linear(placed, layer, groups, False), found)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_bits_that_it_has_alone(form, threads):
    before = _C.num_threads()
    moe = small_moe(form, shared=True)
    x, shared = torch.randn(37, 72), torch.randn(37, 72)
    try:
        _C.set_num_threads(threads)
        whole = native.layer.experts(x, moe, shared)
        for row in range(len(x)):
            assert torch.equal(native.layer.experts(x[row : row + 1], moe, shared[row : row + 1])[0], whole[row])
    finally:
        _C.set_num_threads(before)


def test_slots_are_added_in_their_order_and_the_shared_expert_at_last():
    moe = small_moe(shared=True)
    x, shared = torch.randn(5, 72), torch.randn(5, 72)
    routing = experts.route_rows(x, moe)
    groups = experts.group_pairs(routing.experts, 9)
    y = torch.randn(15, 72)
    found = experts.combine_experts(y, groups, routing, shared)
    expected = experts.combine_experts_reference(y.double(), groups, routing, shared)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    without = experts.combine_experts(y, groups, routing)
    torch.testing.assert_close(found - without, routing.shared_scale[:, None] * shared, rtol=1e-4, atol=1e-5)


def test_bad_arguments_are_named():
    moe = small_moe()
    x = torch.randn(2, 72)
    with pytest.raises(ValueError, match=r"experts: entry 1 is 9, expected 0 to 8"):
        experts.group_pairs(torch.tensor([[0, 9]], dtype=torch.int32), 9)
    with pytest.raises(ValueError, match=r"experts: expected 1 to 9 for each row, got 10"):
        experts.route_rows(x, replace(moe, per_token=10))
    groups = experts.group_pairs(experts.route_rows(x, moe).experts, 9)
    with pytest.raises(ValueError, match="rows: entry 0 is 7, expected 0 to 1"):
        wrong = experts.Groups(groups.starts, groups.rows + 7, groups.places)
        experts.expert_linear(x, moe.gate_up, wrong, True)
    with pytest.raises(ValueError, match="starts: expected rising numbers from 0 to 6"):
        wrong = experts.Groups(groups.starts.flip(0).contiguous(), groups.rows, groups.places)
        experts.expert_linear(x, moe.gate_up, wrong, True)
    with pytest.raises(ValueError, match="panels"):
        experts.expert_linear(x, ExpertProjection(moe.gate_up.weights, (81,)), groups, True)
    wrong = experts.Groups(groups.starts, groups.rows, groups.places + 6)
    with pytest.raises(ValueError, match="places: entry 0"):
        experts.combine_experts(torch.randn(6, 72), wrong, experts.route_rows(x, moe))
