"""`specengine quantize` of mixtures of experts: every target and family, read back, run and compared; refusals."""

import json
import re
from dataclasses import replace

import gguf
import pytest
import torch
from safetensors.torch import load_file

from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import RandomCheckpoint, open_checkpoint
from specengine.models.transformer import load_transformer
from specengine.quantise.gguf_tensors import StreamedTensor, gguf_tensors
from specengine.quantise.quantise import TARGETS, quantise
from specengine.quantise.source import Source, is_gate, is_linear
from tests.models.files import random_state
from tests.models.moe_files import write_moe_gguf
from tests.quantise.mixtures import EXPERTS, config_of, float_folder
from tests.quantise.written import ERRORS, folder_name, place, written_values

CPU = torch.device("cpu")


def logits_of(path):
    target = load_transformer(open_checkpoint(path), "float32", CPU)
    cache, rows = target.new_cache(), list(range(3, 43))
    place = cache.batch([cache.allocate(len(rows))], [0])
    return target.forward(TreeBatch.chains([rows], CPU), cache, place).scores


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("family", EXPERTS)
def test_a_mixture_comes_back_within_the_error_of_its_format_and_runs(tmp_path, to, kind, family):
    config, out = config_of(family), place(tmp_path, to)
    state = random_state(config)
    make = float_folder if kind == "hf" else write_moe_gguf
    source = make(tmp_path / f"source.{kind}", config, state)
    assert quantise(source, to, out).tensors == len(state)
    written, checkpoint = written_values(out, to, config), open_checkpoint(out)
    assert checkpoint.config == replace(open_checkpoint(source).config, dtype=checkpoint.config.dtype)
    assert set(checkpoint.tensors) == set(written) == set(state)
    for name, expected in state.items():
        error = ((written[name] - expected).norm() / expected.norm()).item()
        if is_linear(name):
            assert ERRORS[to][0] < error < ERRORS[to][1], (name, error)
        elif expected.ndim == 1 or is_gate(name):
            assert torch.equal(written[name], expected), name
        else:
            assert 0 < error < 0.01, (name, error)
        assert torch.equal(checkpoint.read(name).float(), written[name]), name
    logits, unquantised = logits_of(out), logits_of(source)
    assert torch.equal(logits, logits_of(float_folder(tmp_path / "values", config, written)))
    assert (logits - unquantised).abs().max() > 1e-3 * unquantised.std()


def test_a_gguf_file_has_the_tensors_types_and_keys_of_converters(tmp_path):
    config = config_of("qwen2_moe")
    quantise(float_folder(tmp_path / "hf", config, random_state(config)), "q4_1", tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: (tensor.tensor_type.name, tensor.shape.tolist()) for tensor in reader.tensors}
    assert found["blk.1.ffn_down_exps.weight"] == ("Q4_1", [96, 192, 4])
    assert found["blk.0.ffn_gate_exps.weight"] == found["blk.0.ffn_up_exps.weight"] == ("Q4_1", [192, 96, 4])
    assert found["blk.0.ffn_up_shexp.weight"] == ("Q4_1", [192, 128])
    assert found["blk.0.ffn_gate_inp.weight"] == ("F32", [192, 4])
    assert found["blk.0.ffn_gate_inp_shexp.weight"] == ("F32", [192])
    keys = ("count", "used_count", "feed_forward_length", "shared_feed_forward_length")
    assert [reader.fields[f"qwen2moe.expert_{key}"].contents() for key in keys] == [4, 2, 96, 128]


def test_experts_are_in_memory_one_matrix_at_a_time():
    events = []

    class Recorded(Source):
        def steps(self, name):
            events.append(name)
            return super().steps(name)

    class File:
        def write(self, data):
            events.append(memoryview(data).nbytes)

    source = Recorded(RandomCheckpoint(config_of("mixtral")), None)
    tensor = next(each for each in gguf_tensors(source, "q8_0") if each.name == "blk.1.ffn_up_exps.weight")
    StreamedTensor(source, tensor).tofile(File())
    size = 96 * 192 // 32 * 34
    assert tensor.nbytes == 4 * size
    names = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(4)]
    assert events == [event for name in names for event in (name, size)]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_a_folder_says_what_stays_a_float_and_the_groups_of_each_matrix(tmp_path, family):
    config = config_of(family)
    state = random_state(config)
    source = float_folder(tmp_path / "hf", config, state)
    names = [folder_name(name, config).removesuffix(".weight") for name in state]
    gates = [name for name in names if name.endswith(("mlp.gate", "moe.gate", "shared_expert_gate"))]
    assert len(gates) == (2 if family == "mixtral" else 4)
    quantise(source, "fp8-block", tmp_path / "fp8")
    values = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert values["quantization_config"]["modules_to_not_convert"] == ["lm_head", "model.embed_tokens", *gates]
    quantise(source, "int4-g128", tmp_path / "int4")
    said = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == ["lm_head", "model.embed_tokens", *gates]
    tensors, sizes = load_file(tmp_path / "int4" / "model.safetensors"), {}
    for group in said["config_groups"].values():
        fitting = [name for name in names for target in group["targets"] if re.match(target[3:], name)]
        assert not sizes.keys() & set(fitting)  # no matrix has two sizes
        sizes |= dict.fromkeys(fitting, group["weights"]["group_size"])
    assert len(sizes) == sum(map(is_linear, state))
    assert {size for name, size in sizes.items() if ".experts." in name} == {32}  # readers take one for all experts
    assert set(sizes.values()) == ({32, 64} if family == "mixtral" else {32, 64, 128})
    for name, size in sizes.items():
        columns = tensors[f"{name}.weight_shape"][1]
        assert tensors[f"{name}.weight_scale"].shape[1] * size == columns, name


def test_layers_without_experts_stay_so_in_a_folder_and_are_refused_in_a_gguf_file(tmp_path):
    config = config_of("qwen3_moe")
    config = replace(config, moe=replace(config.moe, dense_layers=frozenset({1})))
    source = float_folder(tmp_path / "hf", config, random_state(config))
    quantise(source, "int4-g128", tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").config.moe == config.moe
    with pytest.raises(ValueError, match="a GGUF file of qwen3_moe has experts in every layer, and layer 1 has none"):
        quantise(source, "q8_0", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(("family", "other"), [("qwen2_moe", True), ("qwen3_moe", False), ("olmoe", True)])
def test_weights_of_experts_that_llama_cpp_would_normalise_otherwise_are_refused(tmp_path, family, other):
    config = config_of(family)
    config = replace(config, moe=replace(config.moe, renormalise=other))
    source = float_folder(tmp_path / "hf", config, random_state(config))
    with pytest.raises(ValueError, match=f"a GGUF file cannot say that moe.renormalise is {other}"):
        quantise(source, "q8_0", tmp_path / "m.gguf")


@pytest.mark.parametrize("to", ["q4_1", "fp8-block"])
def test_families_that_no_writer_knows_are_named(tmp_path, to):
    for preset, family in (("tiny-gpt-oss", "gpt_oss"), ("tiny-granite-moe", "granitemoe")):
        with pytest.raises(ValueError, match=f"models of {family} cannot be written yet, expected llama, .*, olmoe"):
            quantise(f"random:{preset}", to, place(tmp_path, to))
    assert [*tmp_path.iterdir()] == []


def test_columns_of_experts_that_have_no_groups_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.weight' has 40 columns"):
        quantise("random:tiny-olmoe", "q8_0", tmp_path / "m.gguf")
