"""Engines on the device with weights in codes: they keep their bits, and speculation says what plain decoding says."""

import pytest
import torch

from specengine.models.presets import PRESETS
from specengine.ops import cuda_ops
from specengine.ops.coded.weight import coded_values
from specengine.tensor_parallel.loading import load_model
from tests.backends import cpu_kernels
from tests.engine.device.prompts import GREEDY, LOOKUP, PROMPTS, SAMPLED
from tests.engines import ids
from tests.models.files import random_state
from tests.ops.packing import values_of


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_speculation_says_what_plain_decoding_says(device_engine, dtype, params):
    plain = device_engine("none", dtype=dtype, max_batch_size=1)
    assert plain.model.target.formats == {"int4": {"q4_min", "q8"}, "int8": {"q8"}}[dtype]
    expected = ids(plain.generate(PROMPTS, params))
    assert ids(device_engine(LOOKUP, dtype=dtype, max_batch_size=3).generate(PROMPTS, params)) == expected


def test_blocks_of_a_file_are_held_in_codes_with_the_values_that_the_cpu_holds(cuda_backend, tmp_path):
    quants = pytest.importorskip("gguf.quants")
    from tests.models.gguf_files import Type, write_gguf

    config = PRESETS["tiny-llama"]
    state = random_state(config)
    for name, value in state.items():
        if value.ndim == 2:
            kind = Type.Q8_0 if "down_proj" in name or "v_proj" in name else Type.Q4_1
            state[name] = (quants.quantize(value.numpy(), kind), kind)
    path = write_gguf(tmp_path / "m.gguf", config, state)
    held = load_model(path, device=cuda_backend.device.type, ops=cuda_ops(cuda_backend.device)).target
    assert held.formats == {"q4_min", "q8"}
    with cpu_kernels():
        expected = load_model(path, device="cpu").target
        for ours, theirs in zip(held._layers, expected._layers, strict=True):
            for name, columns in (("qkv", config.hidden_size), ("down", config.intermediate_size)):
                for a, b in zip(getattr(ours, name).weights, getattr(theirs, name).weights, strict=True):
                    assert (a.format, a.rows) == (b.format, b.rows)
                    assert torch.equal(coded_values(a, columns).cpu(), values_of(b, columns))
