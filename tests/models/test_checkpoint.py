"""Reading weights: folders of safetensors and .bin files, and seeded random weights."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from specengine.models.checkpoint import (
    RandomCheckpoint,
    SafetensorsCheckpoint,
    TorchBinCheckpoint,
    expected_tensors,
    open_checkpoint,
)
from specengine.models.presets import PRESETS
from tests.models.files import CONFIG_JSON, random_state, write_folder

TINY = PRESETS["tiny-llama"]


def assert_reads_back(checkpoint, state):
    assert set(checkpoint.tensors) == set(state)
    for name, tensor in state.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor), name
        third = tensor.shape[0] // 3
        assert torch.equal(checkpoint.read_rows(name, third, 2 * third + 1), tensor[third : 2 * third + 1])


def one_line_error(kind, match, call, *arguments):
    with pytest.raises(kind, match=match) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_folder_reads_back_the_written_tensors(tmp_path, kind, shards, dtype):
    state = random_state(TINY, dtype=dtype)
    checkpoint = open_checkpoint(write_folder(tmp_path, state, kind, shards))
    assert isinstance(checkpoint, SafetensorsCheckpoint if kind == "safetensors" else TorchBinCheckpoint)
    assert checkpoint.config.num_layers == 2
    assert_reads_back(checkpoint, state)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_what_transformers_saves_is_what_is_read(tmp_path, family, shard_size):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"attention_bias": True, "mlp_bias": True} if family == "Llama" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=family == "Qwen2",
        **options,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "100KB")
    state = model.state_dict()
    if family == "Qwen2":
        del state["lm_head.weight"]
    checkpoint = open_checkpoint(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected_tensors(checkpoint.config)
    assert_reads_back(checkpoint, state)


def test_safetensors_are_preferred_to_pickles(tmp_path):
    state = random_state(TINY)
    write_folder(tmp_path, state, "bin")
    write_folder(tmp_path, state, "safetensors")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)


def test_rows_are_copies_that_outlive_the_file(tmp_path):
    state = random_state(TINY)
    checkpoint = open_checkpoint(write_folder(tmp_path, state))
    rows = checkpoint.read_rows("lm_head.weight", 0, 5)
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(rows, state["lm_head.weight"][:5])
    assert rows.untyped_storage().nbytes() == rows.nbytes


def test_rows_outside_a_tensor_are_refused(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path, random_state(TINY)))
    one_line_error(ValueError, "lm_head.weight", checkpoint.read_rows, "lm_head.weight", 0, 321)
    one_line_error(ValueError, "lm_head.weight", checkpoint.read_rows, "lm_head.weight", -1, 3)
    one_line_error(ValueError, "no tensor 'head'", checkpoint.read, "head")
    assert checkpoint.read_rows("lm_head.weight", 7, 7).shape == (0, 64)


def test_integer_tables_of_draft_heads_keep_their_type(tmp_path):
    save_file({"d2t": torch.arange(5), "t2d": torch.tensor([True, False])}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert torch.equal(checkpoint.read("d2t"), torch.arange(5))
    assert torch.equal(checkpoint.read("t2d"), torch.tensor([True, False]))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.mlp.up_proj.weight", None),
        ("lm_head.weight", None),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(160, 64)),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
        ("model.layers.0.self_attn.k_proj.weight", torch.ones(64, 64)),
        ("model.norm.weight", torch.tensor(1.0)),
        ("model.norm.weight", torch.ones(64, dtype=torch.int64)),
        ("model.norm.weight", torch.ones(64).to(torch.float8_e4m3fn)),
    ],
)
def test_a_tensor_that_does_not_fit_the_model_is_named(tmp_path, kind, name, value):
    state = random_state(TINY)
    state.pop(name, None)
    if value is not None:
        state[name] = value
    one_line_error(ValueError, name, open_checkpoint, write_folder(tmp_path, state, kind))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_truncated_file_is_named(tmp_path, kind, shards):
    write_folder(tmp_path, random_state(TINY), kind, shards)
    path = max(tmp_path.glob(f"*.{kind}"))
    content = path.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        one_line_error(ValueError, path.name, open_checkpoint, tmp_path)


def test_a_corrupt_safetensors_header_is_named(tmp_path):
    write_folder(tmp_path, random_state(TINY))
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:20] = b"\xff" * 12
    path.write_bytes(content)
    one_line_error(ValueError, "model.safetensors", open_checkpoint, tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    write_folder(tmp_path, random_state(TINY), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    one_line_error(ValueError, "model-00002-of-00002.safetensors", open_checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{", "index.json: not valid JSON"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"model.norm.weight": "../outside.safetensors"}}', "outside"),
        ('{"weight_map": {"nowhere": "model-00001-of-00002.safetensors"}}', "nowhere"),
    ],
)
def test_an_index_that_misleads_is_refused(tmp_path, index, match):
    write_folder(tmp_path, random_state(TINY), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    one_line_error(ValueError, match, open_checkpoint, tmp_path)


class _Touch:
    """Unpickling this would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickled_code_is_refused_and_never_run(tmp_path):
    marker = tmp_path / "executed"
    write_folder(tmp_path, {**random_state(TINY), "payload": _Touch(marker)}, "bin")
    one_line_error(ValueError, "pytorch_model.bin", open_checkpoint, tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("content", [[torch.ones(2)], {"step": 3}, {"w": torch.eye(2).to_sparse()}])
def test_a_bin_file_that_is_not_a_dict_of_dense_tensors_is_refused(tmp_path, content):
    write_folder(tmp_path, content, "bin")
    one_line_error(ValueError, "pytorch_model.bin", open_checkpoint, tmp_path)


def test_paths_that_are_no_checkpoint_are_refused(tmp_path):
    one_line_error(FileNotFoundError, "nowhere", open_checkpoint, tmp_path / "nowhere")
    one_line_error(FileNotFoundError, "model.safetensors", open_checkpoint, tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"")
    one_line_error(ValueError, "weights.pt", open_checkpoint, tmp_path / "weights.pt")
    one_line_error(ValueError, "tiny-llama", open_checkpoint, "random:enormous")


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny-")])
def test_random_presets_are_complete_and_repeatable(preset):
    checkpoint, again = open_checkpoint(f"random:{preset}"), open_checkpoint(f"random:{preset}")
    assert checkpoint.config == PRESETS[preset]
    assert list(checkpoint.tensors) == list(expected_tensors(checkpoint.config))
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.read(name), again.read(name))


def test_random_rows_do_not_depend_on_how_they_are_asked_for():
    wide = replace(PRESETS["tiny-llama"], vocab_size=70_000)  # 64 columns: blocks of 16,384 rows
    checkpoint = RandomCheckpoint(wide)
    whole = checkpoint.read("lm_head.weight")
    for start, stop in ((0, 1), (16_383, 16_385), (5_000, 60_001), (69_999, 70_000)):
        assert torch.equal(checkpoint.read_rows("lm_head.weight", start, stop), whole[start:stop])
    assert not torch.equal(whole[:16_384], whole[16_384:32_768])


def test_random_weights_depend_on_name_and_seed():
    config = PRESETS["tiny-llama"]
    first, second = RandomCheckpoint(config, seed=0), RandomCheckpoint(config, seed=1)
    queries = "model.layers.{}.self_attn.q_proj.weight"
    assert not torch.equal(first.read(queries.format(0)), second.read(queries.format(0)))
    assert not torch.equal(first.read(queries.format(0)), first.read(queries.format(1)))
    assert torch.equal(first.read("model.norm.weight"), torch.ones(64))


def test_random_weights_have_the_configured_type():
    checkpoint = RandomCheckpoint(replace(PRESETS["tiny-llama"], dtype="bfloat16"))
    assert checkpoint.read("lm_head.weight").dtype == torch.bfloat16
    one_line_error(ValueError, "float8", RandomCheckpoint, replace(PRESETS["tiny-llama"], dtype="float8"))


def test_random_models_give_logits_that_are_neither_flat_nor_one_hot():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG_JSON, head_dim=16))
    model.load_state_dict(random_state(TINY))
    with torch.no_grad():
        logits = model(torch.arange(40)[None] * 7).logits
    assert 1.0 < logits.std() < 4.0


READ_IN_BLOCKS = """
import sys
from specengine.models.checkpoint import open_checkpoint

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

open_checkpoint(sys.argv[1]).read("model.norm.weight")  # memory that the libraries take on first use is not counted
before = peak()
checkpoint = open_checkpoint(sys.argv[2])
total = 0
for name, info in checkpoint.tensors.items():
    row_bytes = checkpoint.read_rows(name, 0, 1).nbytes
    step = max(1, (16 << 20) // row_bytes)
    for start in range(0, info.shape[0], step):
        total += checkpoint.read_rows(name, start, min(start + step, info.shape[0])).nbytes
print(total, peak() - before)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(("kind", "share"), [("safetensors", 0.15), ("bin", 0.25)])
def test_reading_in_blocks_keeps_memory_far_below_the_model(tmp_path, kind, share):
    small = write_folder(tmp_path / "small", random_state(TINY), kind)
    wide = {**CONFIG_JSON, "vocab_size": 400_000}
    state = random_state(TINY)
    state |= {name: torch.ones(400_000, 64) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    folder = write_folder(tmp_path / "large", state, kind)
    (folder / "config.json").write_text(json.dumps(wide))
    size = sum(tensor.nbytes for tensor in state.values())
    del state
    command = [sys.executable, "-c", READ_IN_BLOCKS, str(small), str(folder)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    total, growth = map(int, output.split())
    assert total == size > 200_000_000
    assert growth < share * size, f"{growth / 2**20:.1f} MiB for a model of {size / 2**20:.1f} MiB"
