"""A mixture of experts: routing, grouping by expert, the experts' products, and their sum.

Shapes: M rows, C columns, E experts, k for each row, P = M k pairs of a row and a slot, N outputs of one expert.
Pairs are grouped by expert, so that a pass reads the weights of an expert once. A row's bits do not depend on M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specengine import _C
from specengine.ops.coded.weight import FORMS
from specengine.ops.weight import Weight

LANES = 32  # chains of a router's sum, csrc/ops/experts/experts.h


@dataclass(frozen=True)
class ExpertProjection:
    """One product of every expert. weights: as in Projection, with the rows of expert 0, of expert 1, and so on.

    rows: of each weight, of one expert.  bias: float32 [E, N].  float_rows: codes multiply rows of floats on the CPU.
    """

    weights: tuple[Weight, ...]
    rows: tuple[int, ...]
    bias: torch.Tensor | None = None
    float_rows: bool = False

    @property
    def quantises_rows(self) -> bool:
        """Whether it multiplies rows quantised to int8."""
        return not self.float_rows and self.weights[0].quantises_rows

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(weight.data.nbytes for weight in self.weights)


@dataclass(frozen=True)
class Moe:
    """The experts of one layer.

    router: [E, C] of a float type.  router_bias: float32 [E].  shared_gate: float32 [C], whose product with a row gives
    the shared expert's scale.  renormalise: weights are a softmax over the k logits, otherwise over all.
    swiglu_limit: 0 for silu(gate) * up; otherwise the gate is clamped_swiglu's.
    """

    router: torch.Tensor
    router_bias: torch.Tensor | None
    shared_gate: torch.Tensor | None
    per_token: int
    renormalise: bool
    intermediate: int
    gate_up: ExpertProjection
    down: ExpertProjection
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0

    @property
    def experts(self) -> int:
        return len(self.router)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' weights."""
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True)
class Routing:
    """experts: int32 [M, k], in falling order of their logits.  weights: float32 [M, k].

    shared_scale: float32 [M], of the shared expert; None: 1.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    shared_scale: torch.Tensor | None


@dataclass(frozen=True)
class Groups:
    """Pairs sorted by expert, those of one expert by row.

    starts: int32 [E + 1], expert e has places starts[e] to starts[e + 1].  rows: int32 [P], the row of each place.
    places: int32 [M, k], the place of each pair.
    """

    starts: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor


def route_rows(x: torch.Tensor, moe: Moe) -> Routing:
    """The k experts of the largest logits of each row of x, float32 [M, C]; ties go to the lower expert."""
    rows, device = len(x), x.device
    experts = torch.empty(rows, moe.per_token, dtype=torch.int32, device=device)
    weights = torch.empty(rows, moe.per_token, device=device)
    logits = torch.empty(rows, moe.experts, device=device)
    scale = None if moe.shared_gate is None else torch.empty(rows, device=device)
    gate = moe.shared_gate
    _C.route_rows(x, moe.router, moe.router_bias, gate, logits, experts, weights, scale, moe.renormalise)
    return Routing(experts, weights, scale)


def group_pairs(experts: torch.Tensor, count: int) -> Groups:
    """Sorts the pairs of int32 [M, k] by expert. count: E. Raises ValueError for an expert out of range."""
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    groups = Groups(starts, torch.empty_like(experts.view(-1)), torch.empty_like(experts))
    _C.group_pairs(experts, groups.starts, groups.rows, groups.places)
    return groups


def expert_linear(x: torch.Tensor, layer: ExpertProjection, groups: Groups, gathers: bool) -> torch.Tensor:
    """Each place's row times its expert's weight, float32 [P, N].

    x: rows as the weights multiply them.  gathers: x has the rows of groups.rows, [M, ..]; otherwise one per place.
    """
    out, first = torch.empty(len(groups.rows), sum(layer.rows), device=x.device), 0
    for weight, rows in zip(layer.weights, layer.rows, strict=True):
        places = groups.rows if gathers else None
        _C.expert_linear(x, places, weight.data, layer.bias, groups.starts, out, first, rows)
        first += rows
    return out


def expert_linear_cuda(x: torch.Tensor, layer: ExpertProjection, groups: Groups, gathers: bool) -> torch.Tensor:
    """As expert_linear, of floats or codes, with x rounded to the type that each weight multiplies."""
    out, first = torch.empty(len(groups.rows), sum(layer.rows), device=x.device), 0
    for weight, rows in zip(layer.weights, layer.rows, strict=True):
        own, places = x.to(weight.row_dtype), groups.rows if gathers else None
        rest = layer.bias, groups.starts, out, first, rows
        if weight.format in FORMS:
            _C.coded_expert_linear(own, places, weight.data, FORMS[weight.format], *rest)
        else:
            _C.expert_linear(own, places, weight.data, *rest)
        first += rows
    return out


def combine_experts(
    y: torch.Tensor, groups: Groups, routing: Routing, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """The weighted sum of y [P, C] over the slots of each row, in their order, float32 [M, C].

    shared: float32 [M, C], added at last, times the routing's shared_scale.
    """
    out = torch.empty(len(groups.places), y.shape[1], device=y.device)
    scale = None if shared is None else routing.shared_scale
    _C.combine_experts(y, groups.places, routing.weights, shared, scale, out)
    return out


@dataclass(frozen=True)
class ExpertOps:
    """The ops of a layer of experts; each field has the signature of the function of its name here.

    rows: x as a product multiplies it.  rounds: as in LayerOps.
    """

    route_rows: Callable[[torch.Tensor, Moe], Routing]
    group_pairs: Callable[[torch.Tensor, int], Groups]
    expert_linear: Callable[[torch.Tensor, ExpertProjection, Groups, bool], torch.Tensor]
    combine_experts: Callable[..., torch.Tensor]
    rows: Callable[[torch.Tensor, ExpertProjection], torch.Tensor]
    silu_mul: Callable[[torch.Tensor, torch.Tensor], None]
    clamped_swiglu: Callable[[torch.Tensor, torch.Tensor, float, float], None]
    rounds: bool

    def __call__(self, x: torch.Tensor, moe: Moe, shared: torch.Tensor | None) -> torch.Tensor:
        """What the experts add to the residual stream for rows x, float32 [M, C]. shared: of the shared expert."""
        routing = self.route_rows(x, moe)
        groups = self.group_pairs(routing.experts, moe.experts)
        gate_up = self.expert_linear(self.rows(x, moe.gate_up), moe.gate_up, groups, True)
        dtype = moe.down.weights[0].row_dtype if self.rounds else torch.float32
        gated = torch.empty(len(gate_up), moe.intermediate, dtype=dtype, device=x.device)
        if moe.swiglu_limit > 0:
            self.clamped_swiglu(gate_up, gated, moe.swiglu_limit, moe.swiglu_alpha)
        else:
            self.silu_mul(gate_up, gated)
        y = self.expert_linear(self.rows(gated, moe.down), moe.down, groups, False)
        return self.combine_experts(y, groups, routing, shared)


def router_logits_reference(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float32 [M, E]: sums of 32 chains, in the order of csrc/ops/experts/experts.h.

    A multiply-add in float64 is rounded twice: in rare cases a chain's last bit differs from that of the kernels.
    """
    columns = -(-x.shape[1] // LANES) * LANES
    padded, weights = (F.pad(each.double(), (0, columns - each.shape[1])) for each in (x, router))
    lanes = torch.zeros(len(x), len(router), LANES, device=x.device)
    for first in range(0, columns, LANES):
        products = padded[:, None, first : first + LANES] * weights[None, :, first : first + LANES]
        lanes = (products + lanes.double()).float()
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    logits = lanes[..., 0]
    return logits if bias is None else logits + bias


def route_rows_reference(x: torch.Tensor, moe: Moe) -> Routing:
    logits = router_logits_reference(x, moe.router, moe.router_bias)
    largest, order = logits.sort(dim=1, descending=True, stable=True)
    chosen = largest[:, : moe.per_token]
    weights = (chosen if moe.renormalise else largest).softmax(dim=1)[:, : moe.per_token]
    gate = moe.shared_gate
    scale = None if gate is None else router_logits_reference(x, gate[None], None)[:, 0].sigmoid()
    return Routing(order[:, : moe.per_token].int().contiguous(), weights.contiguous(), scale)


def group_pairs_reference(experts: torch.Tensor, count: int) -> Groups:
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    starts = F.pad(flat.bincount(minlength=count).cumsum(0), (1, 0))
    return Groups(starts.int(), (order // experts.shape[1]).int(), places.view(experts.shape).int())


def expert_linear_reference(x: torch.Tensor, layer: ExpertProjection, groups: Groups, gathers: bool) -> torch.Tensor:
    rows = x[groups.rows.long()] if gathers else x
    count = len(groups.starts) - 1
    out = torch.empty(len(rows), sum(layer.rows), device=x.device)
    for expert in range(count):
        first, last = groups.starts[expert : expert + 2].tolist()
        own = [w.data.view(count, n, -1)[expert].float() for w, n in zip(layer.weights, layer.rows, strict=True)]
        out[first:last] = rows[first:last] @ torch.cat(own).T
        if layer.bias is not None:
            out[first:last] += layer.bias[expert]
    return out


def combine_experts_reference(
    y: torch.Tensor, groups: Groups, routing: Routing, shared: torch.Tensor | None = None
) -> torch.Tensor:
    out = (y[groups.places.long()] * routing.weights[..., None]).sum(dim=1)
    if shared is None:
        return out
    return out + (shared if routing.shared_scale is None else routing.shared_scale[:, None] * shared)
