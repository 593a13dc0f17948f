"""The fake core refuses what the core refuses, takes what it takes, and launches the kernels that the sources have."""

import re
from pathlib import Path

import pytest
import torch

from specengine import _C
from tests.fake_cuda.core import OPS, UNDER_MASKS, FakeCore, check, walks
from tests.fake_cuda.mode import CUDA
from tests.ops.arguments import OPS as ARGUMENTS
from tests.ops.arguments import RECORDS
from tests.selection import looped

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
# Their operands lie otherwise on CUDA: weights are [N, C], and rows have the weight's type.
CUDA_LAYOUT = {
    "gather_rows": {"weight": (32, 6)},
    "linear": {"weight": (20, 6)},
    "linear_argmax": {"weight": (20, 6)},
    "expert_linear": {"weight": (128, 6)},
}
EXACT = {"exact_attention"}  # in place of tensor_attention, for float32 caches
CHAINS = {"chain"}  # in place of tree, where there are no ancestors
ADAPTERS = {"lora_shrink", "lora_expand"}  # see tests/engine/device/test_adapters.py
ON_BOTH = sorted({*OPS} & {*ARGUMENTS})


def on_device(name, arguments):
    """The arguments with fake tensors."""

    def put(label, value):
        shape = CUDA_LAYOUT.get(name, {}).get(label, getattr(value, "shape", None))
        return torch.empty(shape, dtype=value.dtype, device=CUDA) if isinstance(value, torch.Tensor) else value

    return {label: put(label, value) for label, value in arguments.items()}


def check_call(name, arguments):
    """Checks arguments by name, of which some are fields of records."""
    arguments = dict(arguments)
    for record, make in RECORDS.get(name, {}).items():
        arguments[record] = make(arguments)
    order = re.findall(r"(\w+): ", getattr(_C, name).__doc__.splitlines()[0])
    assert {*order} == {*arguments}
    check(name, tuple(arguments[label] for label in order))


def test_every_kernel_of_the_sources_is_launched_by_an_op():
    own = {"walk", *walks("token_v1", True), *UNDER_MASKS} | EXACT | CHAINS | ADAPTERS
    launched = {kernel for op in OPS.values() for kernel in op.kernels} | own
    declared = re.compile(r"__global__[^;{]*?(\w+)_kernel\(")
    kernels = {name for path in SOURCES.rglob("*.cu*") for name in declared.findall(path.read_text())}
    assert launched == kernels


@looped("name", ON_BOTH)
def test_valid_arguments_of_the_core_are_taken(device, name):
    check_call(name, on_device(name, ARGUMENTS[name]()))


@looped("name", ON_BOTH)
def test_spoilt_arguments_are_refused_by_name(device, name):
    valid = ARGUMENTS[name]()
    for label, value in valid.items():
        if not isinstance(value, torch.Tensor):
            continue
        good = on_device(name, valid)
        own = good[label]
        spoilt = {
            "its type": own.to(torch.complex64),  # which no op takes
            "its place": value,
            "a dimension more": own[None],
            "its layout": torch.empty((*own.shape, 2), dtype=own.dtype, device=CUDA)[..., 0],
        }
        for what, bad in spoilt.items():
            try:
                check_call(name, good | {label: bad})
            except ValueError as error:
                assert str(error).startswith(f"{name}: "), error
            else:
                pytest.fail(f"{label}: {what} is taken")


def test_constants_and_records_are_the_cores_own(device):
    core = FakeCore(device)
    assert core.MAX_NODES == _C.MAX_NODES and core.KVCacheView is _C.KVCacheView
