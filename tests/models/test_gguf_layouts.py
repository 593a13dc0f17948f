"""GGUF files as other programs than llama.cpp's converter write them, Ollama's above all, and split models."""

import re
import warnings
from dataclasses import replace

import gguf
import pytest
import torch

from specengine.models.checkpoint import RandomCheckpoint, open_checkpoint
from specengine.models.checkpoint_gguf import GGUFCheckpoint
from specengine.models.presets import PRESETS
from specengine.tokenizer import Tokenizer
from specengine.utils.measurement_cache import file_stamps
from tests.models.files import random_state
from tests.models.gguf_files import rewrite_gguf, split_gguf, write_gguf
from tests.models.hybrid_files import write_hybrid_gguf
from tests.models.moe_files import write_gpt_oss_gguf

LLAMA = replace(PRESETS["tiny-llama"], rms_norm_eps=2**-16, eos_token_ids=(2,))
NUMBERS = (gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32)


def hybrid(name):
    return replace(PRESETS[name], rms_norm_eps=2**-16, eos_token_ids=())


def in_other_layers():
    config = hybrid("tiny-qwen3.5")
    return replace(config, gated_delta=replace(config.gated_delta, layers=frozenset({1, 2})))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of llama.cpp's converter, by architecture."""
    folder = tmp_path_factory.mktemp("converted")
    gpt_oss = replace(PRESETS["tiny-gpt-oss"], rms_norm_eps=2**-16)
    return {
        "llama": write_gguf(folder / "llama.gguf", LLAMA, random_state(LLAMA)),
        "qwen35": write_hybrid_gguf(folder / "dense.gguf", RandomCheckpoint(hybrid("tiny-qwen3.5"))),
        "other layers": write_hybrid_gguf(folder / "other.gguf", RandomCheckpoint(in_other_layers())),
        "qwen35moe": write_hybrid_gguf(folder / "moe.gguf", RandomCheckpoint(hybrid("tiny-qwen3.5-moe"))),
        "gpt-oss": write_gpt_oss_gguf(folder / "oss.gguf", gpt_oss, random_state(gpt_oss)),
    }


def assert_same(path, original):
    found, wanted = open_checkpoint(path), open_checkpoint(original)
    assert found.config == wanted.config and found.tensors == wanted.tensors
    for name in wanted.tensors:
        assert torch.equal(found.read(name), wanted.read(name)), name
    return found


def in_every_layer(source, arch, *only):
    """Turns numbers of a file, `only` some or all, into arrays with one for each layer."""
    fields = gguf.GGUFReader(source).fields
    blocks = fields[f"{arch}.block_count"].contents()
    keys = [key for key in fields if key.startswith(f"{arch}.") and fields[key].types[0] in NUMBERS]
    chosen = [f"{arch}.{key}" for key in only] or [key for key in keys if not key.endswith("block_count")]
    return {key: [fields[key].contents()] * blocks for key in chosen}


def recurrent(source, arch, keys="attention.head_count_kv"):
    """The heads of keys in each layer as Ollama writes them, 0 where there is a state."""
    reader = gguf.GGUFReader(source)
    names, heads = {tensor.name for tensor in reader.tensors}, reader.fields[f"{arch}.{keys}"].contents()
    blocks = reader.fields[f"{arch}.block_count"].contents()
    return {f"{arch}.{keys}": [heads * (f"blk.{layer}.attn_k.weight" in names) for layer in range(blocks)]}


BESIDE = [
    ("v.blk.0.attn_q.weight", torch.ones(4, 4)),
    ("v.patch_embed.weight", torch.ones(4, 3, 2, 2)),
    ("mm.0.weight", torch.ones(8, 4)),
    ("a.conv1d.1.weight", torch.ones(4, 3)),
    ("mtp.layers.0.attn_norm.weight", torch.ones(4)),
    ("mtp.fc.weight", torch.ones(4, 8)),
]
OLLAMA = {"rope.dimension_sections": [2, 1, 1], "rope.mrope_interleaved": True, "ssm.v_head_reordered": True}
LAYOUTS = {
    "numbers of every layer": ("llama", lambda at: {"changes": in_every_layer(at, "llama")}),
    "one number of every layer": ("llama", lambda at: {"changes": in_every_layer(at, "llama", "attention.head_count")}),
    "a hybrid's numbers of every layer": ("qwen35moe", lambda at: {"changes": in_every_layer(at, "qwen35moe")}),
    "names without an ending": ("llama", lambda at: {"renamed": lambda name: name.removesuffix(".weight")}),
    "names of experts without an ending": (
        "qwen35moe",
        lambda at: {"renamed": lambda name: name.removesuffix(".weight")},
    ),
    "vectors with another ending": (
        "qwen35",
        lambda at: {"renamed": lambda name: re.sub(r"(ssm_a|ssm_dt)(\.bias)?$", r"\1.weight", name)},
    ),
    "networks beside": ("llama", lambda at: {"extra": BESIDE}),
    "states by heads of keys": (
        "other layers",
        lambda at: {
            "changes": recurrent(at, "qwen35")
            | {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": None}
        },
    ),
    "Ollama's Qwen3.5": (
        "qwen35",
        lambda at: {
            "changes": recurrent(at, "qwen35") | {f"qwen35.{key}": value for key, value in OLLAMA.items()},
            "renamed": lambda name: name.replace("ssm_dt.bias", "ssm_dt"),
            "extra": BESIDE,
        },
    ),
    "Ollama's mixture": (
        "qwen35moe",
        lambda at: {
            "changes": {
                **recurrent(at, "qwen35moe"),
                **{f"qwen35moe.{key}": value for key, value in OLLAMA.items()},
                "qwen35moe.feed_forward_length": 0,
                "qwen35moe.norm_top_k_prob": True,
            },
            "renamed": lambda name: name.replace("ssm_dt.bias", "ssm_dt"),
            "extra": BESIDE,
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_of_another_program_is_the_same_model(files, tmp_path, layout):
    arch, written = LAYOUTS[layout]
    assert_same(rewrite_gguf(files[arch], tmp_path / "m.gguf", **written(files[arch])), files[arch])


def test_ollamas_gpt_oss_is_the_same_model(files, tmp_path):
    source = files["gpt-oss"]
    fields = {key: field for key, field in gguf.GGUFReader(source).fields.items() if key.startswith("gpt-oss.")}
    keys = dict.fromkeys(fields)
    keys |= {key.replace("gpt-oss.", "gptoss."): field.contents() for key, field in fields.items()}
    keys |= {"general.architecture": "gptoss", "gptoss.rope.scaling.type": None}
    keys |= {"tokenizer.ggml.eos_token_ids": [2, 5, 7]}
    path = rewrite_gguf(
        source,
        tmp_path / "m.gguf",
        keys,
        lambda name: name.replace("attn_output", "attn_out").replace("attn_sinks.weight", "attn_sinks"),
    )
    found, wanted = open_checkpoint(path), open_checkpoint(source)
    assert found.config == replace(wanted.config, eos_token_ids=(2, 5, 7))
    assert found.metadata["tokenizer.ggml.pre"] == "gpt-4o"
    for name in wanted.tensors:
        assert torch.equal(found.read(name), wanted.read(name)), name
    fused = [(f"blk.{layer}.ffn_gate_up_exps.weight", torch.ones(4, 4, 4)) for layer in range(1)]
    with pytest.raises(ValueError, match=r"ffn_gate_up_exps.weight' has gate and up in one, .*; the file looks like"):
        open_checkpoint(rewrite_gguf(source, tmp_path / "n.gguf", keys, extra=fused))


def test_fields_that_ollama_alone_has_are_honoured(files, tmp_path):
    path = rewrite_gguf(files["qwen35"], tmp_path / "a.gguf", {"qwen35.ssm.v_head_reordered": False})
    assert not open_checkpoint(path).config.gated_delta.tiled
    path = rewrite_gguf(files["qwen35moe"], tmp_path / "b.gguf", {"qwen35moe.norm_top_k_prob": False})
    assert not open_checkpoint(path).config.moe.renormalise


@pytest.mark.parametrize(
    ("arch", "written", "message"),
    [
        ("llama", {"changes": {"llama.attention.head_count": [4, 2]}}, "must be the same in all layers, got 4 and 2"),
        ("llama", {"changes": {"llama.attention.head_count": [4]}}, "one for each of 2 layers, got 1"),
        ("llama", {"changes": {"llama.rope.freq_base": [1e4, 2e4]}}, "rope.freq_base' must be the same in all layers"),
        ("llama", {"changes": {"llama.block_count": [2, 2]}}, "llama.block_count' must be a number"),
        ("llama", {"extra": [("blk.0.attn_q", torch.ones(64, 64))]}, "'blk.0.attn_q.weight' and 'blk.0.attn_q' both"),
        ("llama", {"extra": [("vision.weight", torch.ones(4))]}, "tensor 'vision.weight' is unexpected"),
        ("qwen35", {"extra": [("blk.0.ssm_dt", torch.ones(4))]}, "'blk.0.ssm_dt.bias' and 'blk.0.ssm_dt' both are"),
    ],
)
def test_what_cannot_be_honoured_is_named(files, tmp_path, arch, written, message):
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(rewrite_gguf(files[arch], tmp_path / "m.gguf", **written))
    assert "Ollama" not in str(caught.value)


def test_an_error_says_that_a_file_looks_like_ollamas(files, tmp_path):
    blob = tmp_path / f"sha256-{'0a' * 32}"
    rewrite_gguf(files["llama"], blob)
    assert_same(blob, files["llama"])  # Ollama's names have no ending
    for path, changes in ((blob, {}), (tmp_path / "m.gguf", {"llama.vision.block_count": 4})):
        rewrite_gguf(files["llama"], path, {"llama.block_count": 3, **changes})
        with pytest.raises(
            ValueError, match=r"blk.2.attn_norm|layers.2.*is missing.*; the file looks like one of Ollama"
        ):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "token"), [("bos", 2**32 - 1), ("eos", 325), ("eot", 320), ("eom", 320), ("padding", 400)]
)
def test_a_token_beyond_the_vocabulary_is_left_out_with_a_warning(files, tmp_path, key, token):
    changes = {f"tokenizer.ggml.{key}_token_id": token, "tokenizer.ggml.add_bos_token": True}
    path = rewrite_gguf(files["llama"], tmp_path / "m.gguf", changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = open_checkpoint(path)
    told = [str(each.message) for each in caught]
    assert told == (
        []
        if key == "padding"
        else [f"{path}: tokenizer.ggml.{key}_token_id is {token}, but the vocabulary has 320 tokens; it is not used"]
    )
    wanted = {"bos": replace(LLAMA, bos_token_id=None), "eos": replace(LLAMA, eos_token_ids=())}.get(key, LLAMA)
    assert (checkpoint.config.bos_token_id, checkpoint.config.eos_token_ids) == (
        wanted.bos_token_id,
        wanted.eos_token_ids,
    )
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    assert (tokenizer.bos_token_id, tuple(tokenizer.eos_token_ids)) == (wanted.bos_token_id, wanted.eos_token_ids)
    assert tokenizer.encode("") == ([] if key == "bos" else [1])


@pytest.mark.parametrize("count", [2, 5])
def test_a_split_model_is_read_from_any_part(files, tmp_path, count):
    parts = split_gguf(files["llama"], tmp_path, count)
    for path in parts:
        checkpoint = assert_same(path, files["llama"])
        assert len(Tokenizer.from_gguf(checkpoint.metadata).decode([1, 2])) > 0
    assert file_stamps(parts[0]) == file_stamps(parts[-1]) and len(file_stamps(parts[0])) == count


def test_a_split_model_may_hold_other_networks_and_the_layers_of_a_hybrid(files, tmp_path):
    whole = rewrite_gguf(files["qwen35"], tmp_path / "whole.gguf", recurrent(files["qwen35"], "qwen35"), extra=BESIDE)
    assert_same(split_gguf(whole, tmp_path, 3)[1], files["qwen35"])


def test_parts_that_do_not_belong_together_are_named(files, tmp_path):
    first, second, third = split_gguf(files["llama"], tmp_path, 3)
    intact = {path: path.read_bytes() for path in (first, second, third)}

    def refused(message, path=second, kind=ValueError):
        with pytest.raises(kind, match=message):
            open_checkpoint(path)
        for each, data in intact.items():
            each.write_bytes(data)

    second.unlink(), third.unlink()
    refused(
        r"00001-of-00003.gguf: 2 of 3 parts are missing: llama-00002-of-0+3.gguf, llama-0+3-of",
        first,
        FileNotFoundError,
    )
    second.write_bytes(intact[third])
    refused(r"00002-of-00003.gguf: split.no and split.count are 2 and 3, expected 1 and 3")
    rewrite_gguf(files["llama"], third, {"split.no": 2, "split.count": 3})
    refused("tensor '.*' is in another part too")
    third.write_bytes(intact[third][:100])
    refused("00003-of-00003.gguf: the header is truncated")
    rewrite_gguf(third, tmp_path / "other.gguf")
    refused("is one of 3 parts .*expected a name that ends in -00001-of-00003.gguf", tmp_path / "other.gguf")
    rewrite_gguf(files["llama"], third, {"split.no": 2, "split.count": "3"})
    refused("split.count must be an integer", third)
    rewrite_gguf(files["llama"], third, {"split.no": 2, "split.count": 3}, kept=lambda name: False)
    refused("the parts have .* tensors, expected")
    whole = rewrite_gguf(files["llama"], tmp_path / "m-00001-of-00009.gguf", {"split.count": 1})
    assert GGUFCheckpoint(whole).config == replace(LLAMA, dtype=None)  # a whole model by its key, whatever its name
