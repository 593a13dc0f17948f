"""`specengine quantize` of hybrids: every family and target, read back, run and compared; refusals."""

import json
import shutil

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import open_checkpoint, open_published
from specengine.models.transformer import load_transformer
from specengine.quantise.quantise import TARGETS, quantise
from specengine.quantise.source import is_gate
from tests.models.hybrid_files import FAMILIES, tiled, write_hybrid, write_next_gguf
from tests.quantise.written import ERRORS, place

CPU = torch.device("cpu")
# columns are multiples of 32 in every matrix; value heads of 32 make rows of 128
SIZES = {"linear_value_head_dim": 32, "num_hidden_layers": 4}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
FLOATS = ("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight", "mlp.gate.weight", "shared_expert_gate.weight")
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    written = tmp_path_factory.mktemp(request.param)
    write_hybrid(written, request.param, **sizes_of(request.param))
    return written


def sizes_of(family):
    return SIZES if family == "qwen3_5" else SIZES | EXPERTS


def logits_of(checkpoint):
    target = load_transformer(checkpoint, "float32", CPU)
    cache, rows = target.new_cache(), list(range(3, 43))
    place = cache.batch([cache.allocate(len(rows))], [0])
    return target.forward(TreeBatch.chains([rows], CPU), cache, place).scores


def grouped(name, value, delta):
    """Puts the value heads of a GGUF file's tensor back in transformers' order, which swaps the two counts."""

    class Swapped:
        num_key_heads, num_value_heads = delta.num_value_heads // delta.num_key_heads, delta.num_value_heads

    part, size = name.rpartition("linear_attn.")[2], delta.value_head_dim
    if part == "out_proj.weight":
        return tiled(value, 1, Swapped, size)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        keys, values = value.split((2 * delta.key_size, delta.value_size))
        return torch.cat((keys, tiled(values, 0, Swapped, size)))
    if part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "decay", "dt_bias"):
        return tiled(value, 0, Swapped, size if "z" in part else 1)
    return value


def stays(name, value):
    return value.ndim != 2 or name.endswith(FLOATS)


@pytest.mark.parametrize("to", TARGETS)
def test_a_hybrid_comes_back_within_the_error_of_its_format_and_runs(folder, tmp_path, to):
    source, out = open_checkpoint(folder), place(tmp_path, to)
    if source.config.architecture == "qwen3_next" and out.suffix:
        with pytest.raises(ValueError, match="GGUF files of qwen3_next cannot be written yet, expected --to int4-g128"):
            quantise(folder, to, out)
        return
    quantise(folder, to, out)
    written, delta = open_checkpoint(out), source.config.gated_delta
    assert set(written.tensors) == set(source.tensors)
    values = {}
    for name in source.tensors:
        expected = source.read(name).float()
        values[name] = grouped(name, written.read(name).float(), delta) if out.suffix else written.read(name).float()
        if stays(name, expected):
            assert torch.equal(values[name], expected), name
        else:
            error = ((values[name] - expected).norm() / expected.norm()).item()
            low, high = (0, 0.01) if name in ENDS else ERRORS[to]
            assert low < error < high, (name, error)
    source._fill_rows = lambda rows, name, start, stop: rows.copy_(values[name][start:stop])
    unquantised, logits = logits_of(open_checkpoint(folder)), logits_of(written)
    torch.testing.assert_close(logits, logits_of(source), rtol=0, atol=1e-4 * unquantised.std().item())
    assert (logits - unquantised).abs().max() > 1e-3 * unquantised.std()


def test_drafts_change_no_token_of_a_quantised_folder(tmp_path):
    write_hybrid(tmp_path / "hf", "qwen3_5", **SIZES)
    quantise(tmp_path / "hf", "int4-g128", tmp_path / "out")
    prompt, params = [5, 6, 7] * 5, SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=1)
    plain, drafted = (
        Engine(tmp_path / "out", drafter=drafter, device="cpu").generate(prompt, params)
        for drafter in ("none", "prompt_lookup,min_ngram=1,adaptive=false")
    )
    assert plain.token_ids == drafted.token_ids and plain.logprobs == drafted.logprobs


def test_a_folder_has_the_names_and_floats_of_published_ones(folder, tmp_path):
    source = load_file(folder / "model.safetensors")
    quantise(folder, "fp8-block", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    experts = {name for name in source if ".mlp.experts." in name}
    for name in source.keys() - experts - set(ENDS):
        codes = name.endswith(("_proj.weight", "in_proj_qkv.weight", "z.weight"))
        assert (written[name].dtype == torch.float8_e4m3fn) == codes, name
        assert codes or torch.equal(written[name], source[name]), name
    gates = {name.removesuffix(".weight") for name in source if is_gate(name)}
    assert set(said["modules_to_not_convert"]) == {"lm_head", "model.embed_tokens", *gates}


def test_a_gguf_file_has_the_tensors_types_and_keys_of_converters(tmp_path):
    write_hybrid(tmp_path / "hf", "qwen3_5_moe", **sizes_of("qwen3_5_moe"))
    source = open_checkpoint(tmp_path / "hf")
    quantise(tmp_path / "hf", "q4_1", tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: (tensor.tensor_type.name, tensor.shape.tolist()) for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35MOE, 4)
    for name in (name for name in source.tensors if ".experts." not in name):
        own = name.replace("decay", "A_log").replace("dt_bias", "dt_proj.bias")
        assert names.get_name(own, (".weight", ".bias")) in found, name
    assert found["blk.0.attn_qkv.weight"] == ("Q4_1", [64, 2 * 32 + 128])
    assert found["blk.0.ssm_conv1d.weight"] == ("F32", [4, 2 * 32 + 128])
    assert found["blk.0.ssm_alpha.weight"] == found["blk.0.ssm_beta.weight"] == ("F32", [64, 4])
    assert found["blk.0.ssm_a"] == found["blk.0.ssm_dt.bias"] == ("F32", [4])
    assert found["blk.3.post_attention_norm.weight"] == ("F32", [64])
    keys = ("full_attention_interval", "rope.dimension_count", "ssm.inner_size", "expert_shared_feed_forward_length")
    assert [reader.fields[f"qwen35moe.{key}"].contents() for key in keys] == [4, 8, 128, 96]
    assert reader.fields["qwen35moe.rope.dimension_sections"].contents() == [2, 1, 1, 0]
    quantise(tmp_path / "m.gguf", "q8_0", tmp_path / "again.gguf")  # its heads are tiled already
    again, first = (open_checkpoint(tmp_path / f"{stem}.gguf") for stem in ("again", "m"))
    name = "model.layers.0.linear_attn.decay"
    assert torch.equal(again.read(name), first.read(name)) and again.config == first.config


def test_a_model_of_text_and_vision_leaves_vision_and_keeps_its_drafter(tmp_path):
    folder = tmp_path / "hf"
    write_hybrid(folder, "qwen3_5", **SIZES)
    quantise(folder, "int4-g128", tmp_path / "plain")
    values = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "eos_token_id": [2, 9]}
    wrapper = tmp_path / "wrapper"
    shutil.copytree(folder, wrapper)
    (wrapper / "config.json").write_text(json.dumps({**outer, "text_config": values}))
    tensors = load_file(folder / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    aside = {"mtp.fc.weight": torch.randn(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.randn(160, 64)}
    save_file(wrapped | aside | {"model.visual.patch_embed.weight": torch.ones(2, 2)}, wrapper / "model.safetensors")
    quantise(wrapper, "int4-g128", tmp_path / "out")
    plain, written = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "out"))
    assert written.keys() == plain.keys() | aside.keys()
    assert all(torch.equal(written[name], plain[name]) for name in plain)
    assert all(torch.equal(written[name], aside[name].bfloat16()) for name in aside)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["architectures"], said["model_type"]) == (["Qwen3_5ForCausalLM"], "qwen3_5_text")
    assert said["quantization_config"]["ignore"][-1] == r"re:^mtp\..*"
    assert open_checkpoint(tmp_path / "out").config.eos_token_ids == (2, 9)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_transformers_reads_the_weights_of_a_folder(tmp_path, family):
    pytest.importorskip("compressed_tensors")
    write_hybrid(tmp_path / "hf", family, **sizes_of(family))
    quantise(tmp_path / "hf", "int4-g128", tmp_path / "out")
    model = FAMILIES[family][1].from_pretrained(tmp_path / "out", dtype=torch.float32)
    model(torch.tensor([[3, 4]]))  # the first pass turns codes into values
    state = model.state_dict()
    written = open_published(tmp_path / "out")
    values = {name: written.read(name).float() for name in written.tensors}
    prefix = "model.layers.1.mlp.experts"
    for part, sides in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for expert, matrix in enumerate(state.get(f"{prefix}.{part}", ())):
            expected = torch.cat([values[f"{prefix}.{expert}.{side}.weight"] for side in sides])
            assert torch.equal(matrix, expected.bfloat16().float()), (expert, part)  # rounded when it is read
    for name, value in values.items():
        assert ".experts." in name or torch.equal(state[name], value), name


def test_other_sources_of_folders_are_refused_by_name(tmp_path):
    for to in ("int4-g128", "fp8-block"):
        with pytest.raises(ValueError, match=f"{to} of qwen3_5, a hybrid, is written from a checkpoint folder alone"):
            quantise("random:tiny-qwen3.5", to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_of_qwen3_next_is_refused_with_the_source_that_can_be_written(tmp_path):
    model = write_hybrid(tmp_path, "qwen3_next", **sizes_of("qwen3_next"))
    path = write_next_gguf(tmp_path / "m.gguf", open_checkpoint(tmp_path).config, model.state_dict())
    for to, out in (("q8_0", "out.gguf"), ("int4-g128", "out")):
        with pytest.raises(ValueError, match=r"m.gguf: .* from a checkpoint folder"):
            quantise(path, to, tmp_path / out)
        assert not (tmp_path / out).exists()
