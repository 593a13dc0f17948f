"""`specengine quantize`: every target from folders, GGUF files and random weights, read back and compared."""

import json
import re
from dataclasses import replace

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine.models.checkpoint import open_checkpoint
from specengine.models.presets import PRESETS
from specengine.quantise import folder_writer
from specengine.quantise.hf_config import config_json
from specengine.quantise.quantise import TARGETS, quantise
from specengine.quantise.source import Source, is_linear
from specengine.tokenizer.tokenizer import Tokenizer
from tests.models.files import CHAT_TEMPLATE, random_state
from tests.models.gguf_files import write_gguf
from tests.quantise.written import ERRORS, place, written_values
from tests.tokenizer.vocabularies import write_folder

SIZES = {"hidden_size": 192, "intermediate_size": 384, "num_layers": 2}  # groups of 64 and of 128
PRESET = {"llama": "tiny-llama", "qwen2": "tiny-qwen2", "qwen3": "tiny-qwen3"}
CHAT = [{"role": "user", "content": "the"}]
TEXT = "I'll take 12 cats,\n\nplease: é 你好"


def config_of(architecture):
    return replace(PRESETS[PRESET[architecture]], **SIZES, rms_norm_eps=2**-16)


def hf_folder(folder, config, state=None):
    """A folder with a byte-level tokenizer and a chat template; token 7 is a second one that ends a text."""
    values = config_json(config, "test") | {"bos_token_id": 258, "eos_token_id": [259, 7]}
    special = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    write_folder(folder, config__json=values, tokenizer_config__json=special)
    save_file(state or random_state(config), folder / "model.safetensors")
    return folder


def source_of(kind, folder, config):
    return (
        write_gguf(folder / "source.gguf", config, random_state(config))
        if kind == "gguf"
        else hf_folder(folder / "hf", config)
    )


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(
    ("kind", "architecture"), [("hf", "llama"), ("gguf", "llama"), ("hf", "qwen2"), ("gguf", "qwen3")]
)
def test_every_tensor_comes_back_within_the_error_of_its_format(tmp_path, to, kind, architecture):
    config = config_of(architecture)
    source, out = source_of(kind, tmp_path, config), place(tmp_path, to)
    outcome = quantise(source, to, out)
    state, written = random_state(config), written_values(out, to, config)
    assert outcome.tensors == len(state) == len(written)
    for name, expected in state.items():
        error = ((written[name] - expected).norm() / expected.norm()).item()
        if is_linear(name):
            assert ERRORS[to][0] < error < ERRORS[to][1], (name, error)
        else:
            assert error < (0.01 if expected.ndim == 2 else 1e-6), (name, error)
    checkpoint = open_checkpoint(out)
    assert set(checkpoint.tensors) == set(state)
    for name, values in written.items():
        assert torch.equal(checkpoint.read(name).float(), values), name
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("to", ["q4_1", "q8_0"])
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_a_gguf_file_has_the_model_the_tokenizer_and_the_types(tmp_path, to, kind):
    config = replace(config_of("llama"), eos_token_ids=(2,))
    source, out = source_of(kind, tmp_path, config), place(tmp_path, to)
    quantise(source, to, out)
    checkpoint, original = open_checkpoint(out), open_checkpoint(source)
    ends = (259, 7) if kind == "hf" else (2,)
    assert checkpoint.config == replace(original.config, eos_token_ids=ends, dtype=None)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert types["token_embd.weight"] == "Q8_0" and types["output_norm.weight"] == "F32"
    assert types["blk.0.attn_q.weight"] == types["blk.1.ffn_down.weight"] == to.upper()
    for name, info in checkpoint.tensors.items():
        assert info.dtype == original.tensors[name].dtype or len(info.shape) == 2
    if kind == "hf":
        ours, theirs = Tokenizer.from_gguf(checkpoint.metadata), Tokenizer.from_folder(source)
        assert ours.encode(TEXT) == theirs.encode(TEXT) and ours.encode(TEXT) != theirs.encode(TEXT[1:])
        assert ours.render_chat(CHAT) == theirs.render_chat(CHAT)
    else:
        tokenizer = {key: value for key, value in original.metadata.items() if key.startswith("tokenizer.")}
        assert tokenizer.items() <= checkpoint.metadata.items() and len(tokenizer) > 4


@pytest.mark.parametrize("to", ["int4-g128", "fp8-block"])
def test_a_folder_keeps_config_tokenizer_and_end_tokens(tmp_path, to):
    config = config_of("llama")
    source, out = source_of("hf", tmp_path, config), place(tmp_path, to)
    quantise(source, to, out)
    values, original = (json.loads((folder / "config.json").read_text()) for folder in (out, source))
    quantization = values.pop("quantization_config")
    assert values == original | {"torch_dtype": "bfloat16", "_name_or_path": "hf"}
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert Tokenizer.from_folder(out).eos_token_ids == Tokenizer.from_folder(source).eos_token_ids
    if to == "fp8-block":
        assert quantization["weight_block_size"] == [128, 128] and "lm_head" in quantization["modules_to_not_convert"]
        return
    assert "lm_head" in quantization["ignore"]
    sizes = {}
    for group in quantization["config_groups"].values():
        for target in group["targets"]:
            sizes |= {n: group["weights"]["group_size"] for n in random_state(config) if re.match(target[3:], n[:-7])}
    tensors = load_file(out / "model.safetensors")
    assert set(sizes.values()) == {64, 128} and len(sizes) == 14
    for name, size in sizes.items():
        assert tensors[f"{name}_scale"].shape[1] * size == random_state(config)[name].shape[1]


def test_a_gguf_file_becomes_a_folder_with_its_tokenizer(tmp_path):
    source = hf_folder(tmp_path / "hf", config_of("llama"))
    quantise(source, "q8_0", tmp_path / "m.gguf")
    quantise(tmp_path / "m.gguf", "fp8-block", tmp_path / "out")
    ours, theirs = Tokenizer.from_folder(tmp_path / "out"), Tokenizer.from_folder(source)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.render_chat(CHAT) == theirs.render_chat(CHAT)
    assert ours.eos_token_ids == (259, 7)
    values, original = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", source))
    for key, value in original.items():
        assert values[key] == pytest.approx(value) if isinstance(value, float) else values[key] == value, key


def test_large_folders_come_in_shards_with_an_index(tmp_path):
    config = config_of("llama")
    source = hf_folder(tmp_path / "hf", config)
    quantise(source, "int4-g128", tmp_path / "whole")
    folder_writer.write_folder(
        Source(open_checkpoint(source), source), "int4-g128", tmp_path / "out", shard_bytes=100_000
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and {*index.values()} == {file.name for file in files}
    whole, parts = load_file(tmp_path / "whole" / "model.safetensors"), {}
    for file in files:
        tensors = load_file(file)
        assert all(index[name] == file.name for name in tensors)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 100_000 or len(tensors) == 1
        parts |= tensors
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("to", TARGETS)
def test_a_quantised_folder_is_a_source_too(tmp_path, to):
    config = config_of("llama")
    first, out = tmp_path / "first", place(tmp_path, to)
    quantise(hf_folder(tmp_path / "hf", config), "fp8-block", first)
    quantise(first, to, out)
    source, written = open_checkpoint(first), open_checkpoint(out)
    for name in source.tensors:
        expected = source.read(name).float()
        error = (written.read(name).float() - expected).norm() / expected.norm()
        assert error < (ERRORS[to][1] if is_linear(name) else 0.01), (name, error)
        if to == "fp8-block" and is_linear(name):
            assert error < 0.004, name  # the same grid again, but for the rounding of its scale


@pytest.mark.parametrize("to", TARGETS)
def test_a_model_whose_name_selects_its_chat_format_keeps_the_format(tmp_path, to):
    source = hf_folder(tmp_path / "vicuna-7b-v1.5", config_of("llama"))
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    out, back = place(tmp_path, to), tmp_path / "back"
    quantise(source, to, out)
    quantise(out, "fp8-block", back)
    wanted = Tokenizer.from_folder(source).render_chat(CHAT)
    assert "USER" in wanted and Tokenizer.from_folder(back).render_chat(CHAT) == wanted
    written = Tokenizer.from_folder(out) if out.is_dir() else Tokenizer.from_gguf(open_checkpoint(out).metadata)
    assert written.encode_chat(CHAT) == Tokenizer.from_folder(source).encode_chat(CHAT)
