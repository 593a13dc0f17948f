"""GGUF types of four bits and fewer: values, codes, models of them, and refusals."""

import re
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import open_checkpoint
from specengine.models.gguf_codes import CODINGS, code_rows
from specengine.models.presets import PRESETS
from specengine.tensor_parallel.loading import load_model
from tests.models.files import random_state
from tests.models.gguf_blocks import CODED, GRIDS, random_blocks
from tests.models.gguf_files import Type, permuted, write_gguf

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_layers": 1, "vocab_size": 64}
CONFIG = replace(PRESETS["tiny-llama"], **SIZES)
QUERY = "model.layers.0.self_attn.q_proj.weight"


def write(path, kind, extra=()):
    """A file whose matrices all have one type, and their values by Hugging Face name."""
    state, values = random_state(CONFIG), {}
    for seed, name in enumerate([name for name in state if state[name].ndim == 2]):
        data = random_blocks(kind, state[name].shape, seed=seed)
        values[name] = torch.from_numpy(gguf.quants.dequantize(data, Type[kind]).copy())
        state[name] = (permuted(name, torch.from_numpy(data), CONFIG).numpy(), Type[kind])
    return write_gguf(path, CONFIG, state, extra=extra), values


def logits_of(path, tokens):
    target = load_model(path, device="cpu", dtype="float32").target
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(tokens))], [0])
    return target.forward(TreeBatch.chains([tokens], target.device), cache, batch).scores


def test_the_coded_types_are_those_of_the_tests():
    assert set(CODINGS) == set(CODED)


@pytest.mark.parametrize("kind", [*CODED, *GRIDS])
def test_values_equal_those_of_the_gguf_package_in_any_slice_of_rows(tmp_path, kind):
    path, values = write(tmp_path / "m.gguf", kind)
    checkpoint = open_checkpoint(path)
    for name, expected in values.items():
        assert expected.isfinite().all() and expected.std() > 0
        assert torch.equal(checkpoint.read(name), expected), name
        for start, stop in ((0, 1), (7, 25), (20, 32), (5, 5)):
            assert torch.equal(checkpoint.read_rows(name, start, stop), expected[start:stop]), (name, start, stop)
    # the order of rows matters: the same bytes in the order of the file differ
    assert not torch.equal(permuted(QUERY, values[QUERY], CONFIG), checkpoint.read(QUERY))


@pytest.mark.parametrize("kind", CODED)
def test_codes_and_scales_give_the_values(tmp_path, kind):
    path, values = write(tmp_path / "m.gguf", kind)
    checkpoint = open_checkpoint(path)
    for name, expected in values.items():
        info = checkpoint.tensors[name]
        assert info.dtype == "float32" and info.coding == CODINGS[kind]
        rows = checkpoint.read_coded(name, 3, 30)
        groups = expected.shape[1] // info.coding.group
        assert rows.codes.dtype == torch.uint8 and rows.codes.shape == (27, expected.shape[1])
        assert rows.scales.dtype == torch.float32 and rows.scales.shape == (27, groups)
        assert (rows.zeros is not None, rows.minima is not None) == (info.coding.zeros, info.coding.minima)
        assert torch.equal(rows.values(), expected[3:30]), name
        assert checkpoint.column_order(name) is None


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_XS", "IQ3_S"])
def test_a_tensor_without_codes_is_refused_by_name(tmp_path, kind):
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", kind)[0])
    name = "model.norm.weight" if kind in CODED else QUERY
    with pytest.raises(ValueError, match=re.escape(name)):
        checkpoint.read_coded(name, 0, 1)


@pytest.mark.parametrize("kind", ["IQ4_XS", "Q2_K", "NVFP4", "IQ2_S"])
def test_a_model_has_the_logits_of_its_values(tmp_path, kind):
    path, values = write(tmp_path / "m.gguf", kind)
    state = {name: tensor for name, tensor in random_state(CONFIG).items() if name not in values} | values
    floats = write_gguf(tmp_path / "floats.gguf", CONFIG, state)
    tokens = [5, 9, 33, 2]
    logits, expected = (logits_of(each, tokens) for each in (path, floats))
    assert torch.equal(logits, expected) and expected.std() > 0


def test_nvfp4_takes_the_scale_of_its_tensor_in_either_spelling(tmp_path):
    plain = open_checkpoint(write(tmp_path / "plain.gguf", "NVFP4")[0]).read(QUERY)
    for spelling in ("blk.0.attn_q.scale", "blk.0.attn_q.weight.scale"):
        beside = ((spelling, 0.37), ("blk.0.attn_q.input_scale", 5.0))
        extra = [(name, (np.array([value], np.float32), Type.F32)) for name, value in beside]
        checkpoint = open_checkpoint(write(tmp_path / "m.gguf", "NVFP4", extra)[0])
        assert spelling not in checkpoint.tensors
        torch.testing.assert_close(checkpoint.read(QUERY), plain * 0.37, rtol=1e-6, atol=0)
        assert torch.equal(checkpoint.read(QUERY), checkpoint.read_coded(QUERY, 0, len(plain)).values())


@pytest.mark.parametrize(("scale", "kind"), [([1.0, 2.0], "F32"), ([float("nan")], "F32"), ([1.0], "F16")])
def test_a_wrong_scale_of_an_nvfp4_tensor_is_named(tmp_path, scale, kind):
    data = np.array(scale, np.float16 if kind == "F16" else np.float32)
    path, _ = write(tmp_path / "m.gguf", "NVFP4", [("blk.0.attn_q.scale", (data, Type[kind]))])
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.scale.*F32"):
        open_checkpoint(path)


def test_a_scale_beside_a_weight_of_another_type_is_refused(tmp_path):
    extra = [("blk.0.attn_q.scale", (np.ones(1, np.float32), Type.F32))]
    with pytest.raises(ValueError, match=r"attn_q\.scale"):
        open_checkpoint(write(tmp_path / "m.gguf", "IQ4_NL", extra)[0])


def test_an_exponent_that_stands_for_no_number_is_refused():
    blocks = random_blocks("MXFP4", (2, 64))
    assert code_rows("MXFP4", blocks).values().isfinite().all()
    blocks[1, 17] = 255
    with pytest.raises(ValueError, match="exponent 255"):
        code_rows("MXFP4", blocks)


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "Q1_0"])
def test_other_types_are_refused_by_name(tmp_path, kind):
    state = random_state(CONFIG)
    size, block_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    state[QUERY] = (np.zeros((state[QUERY].shape[0], 256 // size * block_bytes), np.uint8), Type[kind])
    with pytest.raises(ValueError, match=f"attn_q.*{kind}.*IQ4_XS"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", CONFIG, state))
