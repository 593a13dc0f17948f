"""The formats of a model's weights: those of its file, or those of the dtype option."""

import dataclasses
import re

import gguf
import numpy as np
import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models import weights
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS
from specengine.models.weights import DTYPES, WeightLoader
from specengine.ops import native, reference
from specengine.tensor_parallel.loading import LoadedModel, load_model
from tests.models.files import random_state, write_folder
from tests.models.gguf_files import Type, write_gguf

TINY = PRESETS["tiny-llama"]
WIDE = dataclasses.replace(  # as wide as blocks of 256 need
    TINY, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64
)
IDS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(loaded: LoadedModel) -> torch.Tensor:
    cache = loaded.target.new_cache()
    batch = cache.batch([cache.allocate(len(IDS))], [0])
    return loaded.target.forward(TreeBatch.chains([IDS], loaded.target.device), cache, batch).scores


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).std() / b.std())


def blocks(kind: str, rows: int, columns: int, seed: int) -> tuple[np.ndarray, Type]:
    """Draws random blocks of a file, scaled to a spread of about 1 / sqrt(columns)."""
    size, bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    data = np.random.default_rng(seed).integers(0, 256, (rows, columns // size, bytes), dtype=np.uint8)
    spread = 1 / np.sqrt(columns)
    if kind == "Q4_K":  # weight = d * s * code - dmin * m: the means cancel
        data[..., :4] = np.array([spread / 250, 7.5 * spread / 250], np.float16).view(np.uint8)
    else:
        data[..., -2:] = np.array([spread / 1300], np.float16).view(np.uint8)
    return data.reshape(rows, -1), Type[kind]


def k_quant_file(path):
    """Makes a model with the formats of usual 4-bit files: v and down projections in 6 bits, the rest in 4."""
    state = random_state(WIDE)
    for seed, (name, value) in enumerate(state.items()):
        if value.ndim == 2:
            kind = "Q6_K" if re.search("v_proj|down_proj|lm_head", name) else "Q4_K"
            state[name] = blocks(kind, *value.shape, seed)
    return write_gguf(path, WIDE, state)


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory):
    return k_quant_file(tmp_path_factory.mktemp("gguf") / "m.gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("folder"), random_state(TINY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_floats_are_held_in_their_own_type(tmp_path, dtype):
    loaded = load_model(write_folder(tmp_path, random_state(TINY, dtype)))
    name = str(dtype).removeprefix("torch.")
    assert loaded.dtype == name and loaded.target.formats == {name}
    assert loaded.target.cache_dtype == dtype
    assert loaded.target.head.weights[0].data.dtype == dtype
    expected = logits(load_model(tmp_path, dtype="float32"))
    assert (
        difference(logits(loaded), expected) < {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    )


def test_a_file_of_4_and_6_bits_is_held_in_blocks_and_never_expanded(k_quants):
    loaded = load_model(k_quants)
    target = loaded.target
    assert loaded.dtype == "auto" and target.formats == {"q4_min", "q8"} and target.cache_dtype == torch.float16
    for layer in target._layers:
        assert [(weight.format, weight.rows) for weight in layer.qkv.weights] == [("q4_min", 384), ("q8", 128)]
        assert [(weight.format, weight.rows) for weight in layer.gate_up.weights] == [("q4_min", 1024)]
        assert [weight.format for weight in (*layer.attention_out.weights, *layer.down.weights)] == ["q4_min", "q8"]
    four = WIDE.num_layers * (384 * 256 + 256 * 256 + 1024 * 256)
    eight = WIDE.num_layers * (128 * 256 + 256 * 512) + 320 * 256
    assert target.weight_bytes() == four * 320 // 512 + eight * 544 // 512
    plain = load_model(k_quants, dtype="float32")
    assert plain.target.weight_bytes() == 4 * (four + eight)
    expected = logits(plain)
    assert 0.3 < expected.std() < 30
    assert difference(logits(loaded), expected) < 0.03


@pytest.mark.parametrize(
    "kind, form", [("Q8_0", "q8"), ("Q4_0", "q4"), ("Q4_1", "q4_min"), ("Q5_0", "q8"), ("Q5_1", "q8")]
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_blocks_of_32_are_held_as_they_are_or_in_8_bits(tmp_path, kind, form, architecture):
    config = dataclasses.replace(PRESETS[f"tiny-{architecture}"], rms_norm_eps=2**-16)
    state = random_state(config)
    for name, value in state.items():
        if value.ndim == 2:  # random weights: rows of q and k need no reordering
            state[name] = (gguf.quants.quantize(value.numpy(), Type[kind]), Type[kind])
    path = write_gguf(tmp_path / "m.gguf", config, state)
    loaded = load_model(path)
    assert loaded.target.formats == {form} and loaded.dtype == "auto"
    assert loaded.target.draft_dtype("auto") == ("int8" if form == "q8" else "int4")
    assert len(loaded.target._layers[0].qkv.weights) == 1
    assert difference(logits(loaded), logits(load_model(path, dtype="float32"))) < 0.05


def test_a_projection_with_a_float_tensor_is_held_in_floats(tmp_path):
    state = random_state(TINY, torch.float16)
    for name, value in state.items():
        if "mlp" in name or name.endswith(("q_proj.weight", "lm_head.weight")):
            state[name] = (gguf.quants.quantize(value.float().numpy(), Type.Q8_0), Type.Q8_0)
    path = write_gguf(tmp_path / "m.gguf", TINY, state)
    loaded = load_model(path)
    assert loaded.target.formats == {"float16", "q8"} and loaded.dtype == "auto"
    assert [weight.format for weight in loaded.target._layers[0].qkv.weights] == ["float16"]
    assert difference(logits(loaded), logits(load_model(path, dtype="float32"))) < 0.03


@pytest.mark.parametrize("dtype, formats, most", [("int8", {"q8"}, 0.03), ("int4", {"q8", "q4_min"}, 0.3)])
def test_floats_are_quantised_where_that_is_asked_for(folder, dtype, formats, most):
    loaded = load_model(folder, dtype=dtype)
    assert loaded.dtype == dtype and loaded.target.formats == formats and loaded.target.cache_dtype == torch.float16
    assert loaded.target.head.weights[0].format == "q8"
    plain = load_model(folder, dtype="float32")
    assert loaded.target.weight_bytes() < plain.target.weight_bytes() * (0.27 if dtype == "int8" else 0.22)
    assert difference(logits(loaded), logits(plain)) < most


@pytest.mark.parametrize(
    "dtype, drafts, head", [("bfloat16", "auto", "bfloat16"), ("int8", "int8", "q8"), ("int4", "int4", "q4_min")]
)
def test_weights_that_draft_take_the_format_of_most_weights(folder, k_quants, dtype, drafts, head):
    target = load_model(folder, dtype=dtype).target
    assert target.draft_dtype("auto") == drafts and target.draft_dtype("float32") == "float32"
    assert target.head_rows(torch.tensor([3, 1], dtype=torch.int32)).weights[0].format == head
    assert load_model(k_quants).target.draft_dtype("auto") == "int4"


@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
def test_a_quantised_file_may_be_held_otherwise(k_quants, dtype):
    loaded = load_model(k_quants, dtype=dtype)
    assert loaded.dtype == dtype
    assert difference(logits(loaded), logits(load_model(k_quants, dtype="float32"))) < 0.3


def test_greedy_tokens_are_the_argmax_of_the_logits(k_quants):
    target = load_model(k_quants).target
    cache = target.new_cache()
    batch, tree = cache.batch([cache.allocate(len(IDS))], [0]), TreeBatch.chains([IDS], target.device)
    scores = target.forward(tree, cache, batch).scores
    assert torch.equal(target.forward(tree, cache, batch, greedy=True).scores, scores.argmax(dim=1).int())


@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_speculation_over_quantised_weights_gives_the_text_of_plain_decoding(k_quants, dtype):
    model, params = load_model(k_quants, dtype=dtype), SamplingParams(max_new_tokens=60, ignore_eos=True)
    plain = Engine(model, drafter="none").generate(IDS, params)
    drafted = Engine(model, drafter="prompt_lookup,min_ngram=1").generate(IDS, params)
    assert drafted.token_ids == plain.token_ids


def test_the_reference_ops_hold_a_quantised_file_in_floats(k_quants):
    loaded = load_model(k_quants, ops=reference)
    assert loaded.dtype == "float32" and loaded.target.formats == {"float32"}
    assert difference(logits(loaded), logits(load_model(k_quants, dtype="float32"))) < 1e-4


@pytest.mark.parametrize("dtype", ["int3", "Float32", "q8", "", None, 8, torch.float32])
def test_a_dtype_that_is_none_is_refused_with_those_there_are(folder, dtype):
    message = f"dtype: expected auto, auto-float32, float32, float16, bfloat16, int8 or int4, got {dtype!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_model(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_ops_without_quantised_arithmetic_refuse_to_quantise(folder, dtype):
    with pytest.raises(ValueError, match=rf"^dtype: {dtype} weights have no kernels in these ops$"):
        load_model(folder, dtype=dtype, ops=reference)


def test_an_engine_may_repeat_the_options_that_its_model_was_loaded_with(folder, k_quants):
    cases = [
        (load_model(k_quants), {"auto"}, "auto"),
        (load_model(k_quants, dtype="int8"), {"auto", "int8"}, "int8"),
        (load_model(folder, dtype="int4"), {"auto", "int4"}, "int4"),
        (load_model(folder), {"auto", "float32"}, "float32"),
    ]
    for loaded, good, held in cases:
        for dtype in ("auto", "float32", "float16", "bfloat16", "int8", "int4"):
            if dtype in good:
                loaded.check_place("auto", dtype, False)
                loaded.check_place("cpu", dtype, False)
            else:
                with pytest.raises(ValueError, match=f"^dtype: this model was loaded with {held}, got '{dtype}'$"):
                    Engine(loaded, drafter="none", dtype=dtype)
        with pytest.raises(ValueError, match=r"^device: this model was loaded with cpu, got 'cuda'$"):
            loaded.check_place("cuda", "auto", False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", ["tiny-llama3", "tiny-qwen2", "tiny-qwen2-moe"])
def test_the_bytes_of_a_model_are_known_before_it_is_read(preset, dtype):
    loader = WeightLoader(RandomCheckpoint(PRESETS[preset]), dtype, torch.device("cpu"), native)
    expected, model = loader.weight_bytes(), loader.model()
    parts = [model.embedding, *([] if model.config.tie_embeddings else [model.head])]
    for layer in model.layers:
        parts += [layer.qkv, layer.attention_out, layer.gate_up, layer.down, layer.moe and layer.moe.gate_up]
        parts += [layer.moe and layer.moe.down]
    assert expected == pytest.approx(sum(part.nbytes for part in parts if part), rel=0.05)  # without routers and norms


def test_a_model_larger_than_the_free_memory_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(weights, "free_memory", lambda: 1)  # of a tiny model: without the check it would be read
    with pytest.raises(ValueError, match=r"^model: .* needs 0\.0 GB .* as int4, 0\.0 GB of memory are free$"):
        load_model("random:tiny-qwen3-moe", device="cpu", dtype="int4")
