"""Engines on the device with weights in codes: they keep their bits, and speculation says what plain decoding says."""

import pytest
import torch

from specengine.ops import cuda_ops
from specengine.ops.coded.weight import coded_values
from specengine.tensor_parallel.loading import load_model
from tests.backends import cpu_kernels
from tests.engine.device.prompts import GREEDY, LOOKUP, PROMPTS, SAMPLED
from tests.engines import ids
from tests.models.files import k_quant_file
from tests.ops.packing import values_of


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_speculation_says_what_plain_decoding_says(device_engine, dtype, params):
    plain = device_engine("none", dtype=dtype, max_batch_size=1)
    assert plain.model.target.formats == {"int4": {"q4_min", "q8"}, "int8": {"q8"}}[dtype]
    expected = ids(plain.generate(PROMPTS, params))
    assert ids(device_engine(LOOKUP, dtype=dtype, max_batch_size=3).generate(PROMPTS, params)) == expected


def test_a_file_of_4_and_6_bits_is_held_in_codes_with_the_values_that_the_cpu_holds(cuda_backend, tmp_path):
    path = k_quant_file(tmp_path / "m.gguf")
    held = load_model(path, device=cuda_backend.device.type, ops=cuda_ops(cuda_backend.device)).target
    assert held.formats == {"q4_min", "q8"}
    with cpu_kernels():
        expected = load_model(path, device="cpu").target
        for ours, theirs in zip(held._layers, expected._layers, strict=True):
            for name, columns in (("qkv", 256), ("gate_up", 256), ("down", 512)):
                for a, b in zip(getattr(ours, name).weights, getattr(theirs, name).weights, strict=True):
                    assert (a.format, a.rows) == (b.format, b.rows)
                    assert torch.equal(coded_values(a, columns).cpu(), values_of(b, columns))
    assert held.weight_bytes() <= 1.01 * expected.weight_bytes()
