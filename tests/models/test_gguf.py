"""Reading GGUF files: header, block types, row order, and every kind of damage."""

import random
import re
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from specengine.models import gguf_file
from specengine.models.checkpoint import open_checkpoint
from specengine.models.checkpoint_gguf import GGUFCheckpoint
from specengine.models.gguf_file import GGUFFile
from specengine.models.gguf_types import ARRAY, DEFAULT_ALIGNMENT, SCALARS, STRING, BlockType
from specengine.models.presets import PRESETS
from tests.models.files import random_state
from tests.models.gguf_files import Type, permuted, write_gguf


@pytest.fixture
def tiny(tmp_path):
    config = PRESETS["tiny-llama"]
    return write_gguf(tmp_path / "tiny.gguf", config, random_state(config))


def one_line_error(match, call, *arguments):
    with pytest.raises(ValueError, match=match) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_float_tensors_come_back_under_their_names_in_their_order_and_type(tmp_path, preset, dtype):
    config = replace(PRESETS[preset], rms_norm_eps=2**-16)  # exact in float32, as metadata is stored
    state = random_state(config, dtype)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, state))
    assert checkpoint.config == replace(config, dtype=None)
    assert set(checkpoint.tensors) == set(state)
    for name, tensor in state.items():
        assert torch.equal(checkpoint.read(name), tensor), name
        assert checkpoint.read(name).dtype == dtype


def test_biases_of_llama_queries_and_keys_are_reordered_with_their_rows(tmp_path):
    config = replace(PRESETS["tiny-llama"], qkv_bias=True, output_bias=True, mlp_bias=True)
    state = random_state(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, state))
    for name, tensor in state.items():
        assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_blocks_are_dequantised_in_any_slice_of_rows(tmp_path, kind):
    config = PRESETS["tiny-llama"]
    state, expected = random_state(config), {}
    for name in [name for name in state if name.endswith("_proj.weight") or "embed" in name]:
        data = gguf.quants.quantize(permuted(name, state[name], config).numpy(), Type[kind])
        state[name], expected[name] = (
            (data, Type[kind]),
            gguf.quants.dequantize(gguf.quants.quantize(state[name].numpy(), Type[kind]), Type[kind]),
        )
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, state))
    for name, values in expected.items():
        assert checkpoint.tensors[name].dtype == kind
        assert np.array_equal(checkpoint.read(name).numpy(), values)
        for start, stop in ((0, 1), (3, 4), (7, 25), (20, 32), (5, 5)):
            rows = checkpoint.read_rows(name, start, stop)
            assert rows.dtype == torch.float32
            assert np.array_equal(rows.numpy(), values[start:stop]), (name, start, stop)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_dequantised_as_the_gguf_package_does(tmp_path, kind):
    config = replace(PRESETS["tiny-qwen2"], hidden_size=256, num_layers=1)
    state = random_state(config)
    name, shape = "model.embed_tokens.weight", (config.vocab_size, 256)
    block_bytes = gguf.GGML_QUANT_SIZES[Type[kind]][1]
    data = np.random.default_rng(0).integers(0, 256, (shape[0], block_bytes), dtype=np.uint8)
    # half-float scales, last in a Q6_K block and first in the others, must be finite
    data.view(np.float16)[:, -1 if kind == "Q6_K" else slice(0, 2)] = 0.01
    state[name] = (data, Type[kind])
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, state))
    values = gguf.quants.dequantize(data, Type[kind])
    assert values.shape == shape and values.std() > 0
    assert np.array_equal(checkpoint.read(name).numpy(), values)
    assert np.array_equal(checkpoint.read_rows(name, 9, 30).numpy(), values[9:30])


def test_large_tensors_are_assembled_from_several_steps(tmp_path):
    config = replace(PRESETS["tiny-llama"], num_heads=64, num_kv_heads=64, head_dim=128, num_layers=1)
    state = random_state(config)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", config, state))
    checkpoint.step_bytes = 1000 * 64 * 4  # steps that end inside a head
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(checkpoint.read(name), state[name])
    assert torch.equal(checkpoint.read_rows(name, 77, 5001), state[name][77:5001])


def test_rope_frequency_divisors_enter_the_configuration(tmp_path):
    config = PRESETS["tiny-llama"]
    divisors = np.arange(1, 9, dtype=np.float32)
    extra = [("rope_freqs.weight", (divisors, Type.F32))]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, random_state(config), extra=extra))
    assert checkpoint.config.rope.freq_divisors == tuple(divisors.tolist())
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_metadata_equals_that_of_the_gguf_package(tmp_path):
    config = PRESETS["tiny-llama"]
    values = gguf.GGUFValueType
    metadata = [
        ("test.u8", 200, values.UINT8),
        ("test.i8", -100, values.INT8),
        ("test.u16", 60_000, values.UINT16),
        ("test.i16", -30_000, values.INT16),
        ("test.i32", -(2**31), values.INT32),
        ("test.u64", 2**64 - 1, values.UINT64),
        ("test.i64", -(2**63), values.INT64),
        ("test.f64", 0.1, values.FLOAT64),
        ("test.bool", True, values.BOOL),
        ("test.text", "naïve 文", values.STRING),
    ]
    path = write_gguf(tmp_path / "m.gguf", config, random_state(config), metadata)
    reader = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    file = GGUFFile(path)
    assert file.metadata == expected
    assert all(type(file.metadata[key]) is type(value) for key, value in expected.items())
    assert file.metadata["tokenizer.ggml.tokens"][:2] == ["tok0é", "tok1é"]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.offset, ours.type) == (tensor.data_offset, tensor.tensor_type)


def with_texts(path, texts):
    """Writes a file without tensors that has an array of these texts."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("test.texts", texts)
    writer.add_array("test.after", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_arrays_of_strings_are_read_across_the_pieces_of_the_file(tmp_path, monkeypatch):
    texts = ["", "a", "文" * 300, "x" * 5000, "", *(f"token {i}" for i in range(3000)), "\0", "🦙"]
    path = with_texts(tmp_path / "m.gguf", texts)
    for chunk in (1, 7, 8, 9, 1000, 1 << 20):
        monkeypatch.setattr(gguf_file, "_CHUNK", chunk)
        metadata = GGUFFile(path).metadata
        assert metadata["test.texts"] == texts
        assert metadata["test.after"] == [1, 2, 3]


def test_damaged_strings_of_an_array_are_refused_as_single_ones(tmp_path):
    texts = [f"token {i}" for i in range(100)]
    path = with_texts(tmp_path / "m.gguf", texts)
    data = path.read_bytes()
    at = data.index(b"token 57")
    for piece, match in (
        (b"\xff", "'test.texts' holds text that is not UTF-8"),
        (b"\xed\xa0\x80", "'test.texts' holds text that is not UTF-8"),  # half of a pair of surrogates
    ):
        path.write_bytes(data[:at] + piece + data[at + len(piece) :])
        one_line_error(match, GGUFFile, path)
    for length in (1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1):
        path.write_bytes(data[: at - 8] + length.to_bytes(8, "little") + data[at:])
        one_line_error("truncated or damaged at 'test.texts'", GGUFFile, path)
    path.write_bytes(data[: at + 3])
    one_line_error("truncated or damaged at 'test.texts'", GGUFFile, path)


def test_block_types_have_the_numbers_and_sizes_of_the_gguf_package():
    ours = {kind.name: (int(kind), kind.columns, kind.nbytes) for kind in BlockType}
    assert ours == {kind.name: (int(kind), *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {*SCALARS, STRING, ARRAY} == {int(kind) for kind in gguf.GGUFValueType}
    assert gguf.GGUF_DEFAULT_ALIGNMENT == DEFAULT_ALIGNMENT


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf"):
        open_checkpoint(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, (1).to_bytes(4, "little"), "version 1"),
        (4, (3).to_bytes(4, "big"), "version"),
        (8, (2**60).to_bytes(8, "little"), "dimensions, expected at most 4"),
        (16, (2**60).to_bytes(8, "little"), "truncated or damaged"),
        (24, (2**62).to_bytes(8, "little"), "metadata key"),
    ],
)
def test_a_damaged_header_is_refused(tiny, offset, value, match):
    content = bytearray(tiny.read_bytes())
    content[offset : offset + len(value)] = value
    tiny.write_bytes(content)
    one_line_error(match, open_checkpoint, tiny)


def test_a_truncated_file_is_refused_wherever_it_ends(tiny):
    content = tiny.read_bytes()
    for length in sorted({*range(0, 200, 7), *range(200, len(content), 4999), len(content) - 64}):
        tiny.write_bytes(content[:length])
        one_line_error("tiny.gguf", open_checkpoint, tiny)
    assert length > len(content) - 100


def test_data_that_passes_the_end_of_the_file_names_the_tensor(tiny):
    content = tiny.read_bytes()
    last = max(GGUFFile(tiny).tensors.items(), key=lambda item: item[1].offset)
    tiny.write_bytes(content[: last[1].offset + 3])
    one_line_error(re.escape(last[0]), GGUFFile, tiny)


@pytest.mark.filterwarnings("ignore:.*it is not used")
def test_flipped_bytes_give_a_value_error_or_a_model(tiny):
    content = tiny.read_bytes()
    header = min(tensor.offset for tensor in GGUFFile(tiny).tensors.values())
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        tiny.write_bytes(damaged)
        try:
            open_checkpoint(tiny)
        except ValueError:
            refused += 1
    assert refused > 50


def test_an_unsupported_block_type_is_named_with_its_tensor(tmp_path):
    config = replace(PRESETS["tiny-llama"], hidden_size=256)
    state = random_state(config)
    block = np.zeros((config.vocab_size, gguf.GGML_QUANT_SIZES[Type.Q8_1][1]), np.uint8)
    state["model.embed_tokens.weight"] = (block, Type.Q8_1)
    path = write_gguf(tmp_path / "m.gguf", config, state)
    one_line_error("token_embd.weight.*Q8_1", open_checkpoint, path)


def test_an_unexpected_tensor_is_named(tmp_path):
    config = PRESETS["tiny-llama"]
    extra = [("blk.0.ffn_norm_2.weight", (np.ones((8, 64), np.float32), Type.F32))]
    path = write_gguf(tmp_path / "m.gguf", config, random_state(config), extra=extra)
    one_line_error("ffn_norm_2", open_checkpoint, path)


def test_a_missing_or_misshaped_tensor_is_named(tmp_path):
    config = PRESETS["tiny-llama"]
    state = random_state(config)
    state["model.layers.1.mlp.up_proj.weight"] = torch.ones(100, 64)
    one_line_error("up_proj", open_checkpoint, write_gguf(tmp_path / "a.gguf", config, state))
    del state["model.layers.1.mlp.up_proj.weight"]
    one_line_error("up_proj", open_checkpoint, write_gguf(tmp_path / "b.gguf", config, state))


@pytest.mark.full
@pytest.mark.model
def test_the_embedded_model_is_read_as_the_gguf_package_reads_it(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.config.num_layers == 30 and checkpoint.config.eos_token_ids == (2,)
    for tensor in gguf.GGUFReader(smollm2_path).tensors:
        if tensor.name in ("blk.3.ffn_down.weight", "blk.29.attn_v.weight", "blk.7.attn_norm.weight"):
            names = {
                "ffn_down": "mlp.down_proj",
                "attn_v": "self_attn.v_proj",
                "attn_norm": "input_layernorm",
            }
            _, layer, kind, _ = tensor.name.split(".")
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            read = checkpoint.read(f"model.layers.{layer}.{names[kind]}.weight")
            assert np.array_equal(read.numpy(), values)
