"""GGUF files of gpt-oss: names, experts in codes, and fields that cannot be honoured."""

from dataclasses import replace

import gguf
import pytest
import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import open_checkpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from tests.models.files import random_state
from tests.models.moe_files import write_gpt_oss_gguf

CPU = torch.device("cpu")


def test_gguf_files_have_the_tensors_of_their_model(tmp_path):
    config = replace(PRESETS["tiny-gpt-oss"], rms_norm_eps=2**-16)
    state = random_state(config)
    checkpoint = open_checkpoint(write_gpt_oss_gguf(tmp_path / "m.gguf", config, state))
    assert checkpoint.config == replace(config, dtype=None)
    assert set(checkpoint.tensors) == set(state)
    for name, tensor in state.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    for end in ("weight", "bias"):
        middle = f"model.layers.1.mlp.experts.2.up_proj.{end}"
        assert torch.equal(checkpoint.read_rows(middle, 3, 11), state[middle][3:11])


def test_gguf_experts_of_mxfp4_keep_their_codes(tmp_path):
    config = replace(PRESETS["tiny-gpt-oss"], moe=replace(PRESETS["tiny-gpt-oss"].moe, intermediate_size=64))
    state = random_state(config)
    checkpoint = open_checkpoint(write_gpt_oss_gguf(tmp_path / "m.gguf", config, state, "MXFP4"))
    raw = gguf.GGMLQuantizationType.MXFP4
    for name in (name for name in state if ".experts." in name and name.endswith("weight")):
        expected = gguf.quants.dequantize(gguf.quants.quantize(state[name].numpy(), raw), raw)
        assert torch.equal(checkpoint.read(name), torch.from_numpy(expected)), name
    kept, floats = (load_transformer(checkpoint, dtype, CPU) for dtype in ("auto", "float32"))
    experts = kept.weights.layers[1].moe
    assert {weight.format for weight in (*experts.gate_up.weights, *experts.down.weights)} == {"table4_32"}
    expected, found = (_logits_of(target, list(range(40))) for target in (floats, kept))
    assert (found - expected).abs().median() < 0.02 * expected.std()


def test_gguf_fields_that_cannot_be_honoured_are_named(tmp_path):
    config, number = PRESETS["tiny-gpt-oss"], gguf.GGUFValueType.UINT32
    state = random_state(config)
    for key, value, message in (
        ("expert_gating_func", 2, "expert_gating_func' must be 3 for architecture gpt-oss"),
        ("attention.sliding_window", 0, "attention.sliding_window' is missing"),
    ):
        path = write_gpt_oss_gguf(tmp_path / "m.gguf", config, state, changes={key: (value, number)})
        with pytest.raises(ValueError, match=message):
            open_checkpoint(path)


def _logits_of(target, prompt):
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(prompt))], [0])
    return target.forward(TreeBatch.chains([prompt], target.device), cache, batch).scores
