"""Ops called from several threads at once: each computes what it computes alone, and what it only reads may be shared.

ThreadSanitizer (`.ci/sanitize thread`) is what makes these tests sharp.
"""

import random

import pytest
import torch

from specengine import _C
from tests.ops.arguments import OPS, Arguments, call, tensors_of
from tests.ops.cases import randn
from tests.threads import at_once


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


class Case:
    """Arguments of an op: what it only reads is shared by all callers; the rest each caller gets as it was before."""

    def __init__(self, op: str) -> None:
        self.op, self.shared = op, OPS[op]()
        before = {name: tensor.clone() for name, tensor in tensors_of(self.shared).items()}
        call(op, self.shared)
        self.expected: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}
        for name, tensor in tensors_of(self.shared).items():
            written = not equal_bits(tensor, before[name])
            if written or not before[name].any():  # a workspace that must be zero is zero again
                self.expected[name], self._own[name] = tensor, before[name]

    def fresh(self) -> Arguments:
        return {**self.shared, **{name: tensor.clone() for name, tensor in self._own.items()}}

    def check(self, arguments: Arguments) -> None:
        for name, tensor in self.expected.items():
            assert equal_bits(arguments[name], tensor), f"{self.op}: {name}"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("op", OPS)
def test_callers_of_one_op_get_what_they_get_alone(op, threads):
    _C.set_num_threads(threads)
    case = Case(op)

    def work(_) -> None:
        for _ in range(5):
            copies = [case.fresh() for _ in range(10)]
            for arguments in copies:  # one behind the other, so that the calls of several threads meet
                call(op, arguments)
            for arguments in copies:
                case.check(arguments)

    at_once(work)


def test_callers_of_different_ops_get_what_they_get_alone():
    _C.set_num_threads(3)
    cases = [Case(op) for op in OPS]

    def work(caller: int) -> None:
        order = random.Random(caller)
        for _ in range(5):
            for case in order.sample(cases, len(cases)):
                arguments = case.fresh()
                call(case.op, arguments)
                case.check(arguments)
            _C.set_num_threads(order.randint(1, 4))

    at_once(work)


def test_instruction_sets_may_be_switched_while_other_threads_compute():
    before, weight = _C.instruction_set(), randn(128, 64, 16)
    rows = torch.arange(2048, dtype=torch.int32)
    expected = torch.zeros(2048, 64)
    _C.gather_rows(weight, rows, expected)  # copies: equal in every set

    def work(caller: int) -> None:
        out = torch.zeros(2048, 64)
        for i in range(40):
            if caller == 0:
                _C.set_instruction_set(_C.instruction_sets[i % len(_C.instruction_sets)])
            _C.gather_rows(weight, rows, out.zero_())
            assert torch.equal(out, expected)

    try:
        at_once(work)
    finally:
        _C.set_instruction_set(before)
