"""Folders as trainers and other programs leave them: what transformers loads has its logits here."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import open_checkpoint, open_published
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from tests.models.files import CONFIG_JSON, random_state
from tests.models.hybrid_files import write_hybrid
from tests.selection import wide

CPU = torch.device("cpu")
IDS = [(7 * i) % 320 for i in range(40)]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BASE = {**CONFIG_JSON, "model_type": "llama"}
TIED = {"tie_word_embeddings": True}
STATE = random_state(PRESETS["tiny-llama"])
DIFFERS = "'lm_head.weight' differs from the embedding; it is used, as transformers does"


def without(state, *names):
    return {name: tensor for name, tensor in state.items() if name not in names}


def renamed(state, change):
    return {change(name): tensor for name, tensor in state.items()}


def bare(name):
    return name.removeprefix("model.")


BUFFERS = {
    "model.rotary_emb.inv_freq": torch.ones(8),
    "model.rotary_emb.original_inv_freq": torch.ones(8),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    "model.layers.1.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 8, 16),
    "model.layers.1.self_attn.rotary_emb.sin_cached": torch.ones(1, 1, 8, 16),
}
SCALES = {
    "model.layers.0.self_attn.k_scale": torch.tensor(1.5),
    "model.layers.0.self_attn.v_scale": torch.tensor(0.5),
    "model.layers.1.self_attn.k_proj.k_scale": torch.ones(1),
    "model.layers.1.self_attn.attn.v_scale": torch.ones(1),
    "model.layers.1.self_attn.kv_scale": torch.ones(1),
}
VALUE_HEAD = {"v_head.summary.weight": torch.ones(1, 64), "v_head.summary.bias": torch.ones(1)}
ONE = {**without(STATE, EMBEDDING, HEAD), HEAD: STATE[EMBEDDING]}
PLAIN, ALIKE = ({}, STATE), (TIED, without(STATE, HEAD))
# changes of config.json, None: without the field; the tensors; a folder of the same model
LAYOUTS = {
    "tied with the head alone": (TIED, ONE, ALIKE),
    "tied with a copy of the embedding": (TIED, {**ONE, EMBEDDING: STATE[EMBEDDING]}, ALIKE),
    "tied with another head": (TIED, STATE, PLAIN),
    "rotary buffers": ({}, STATE | BUFFERS, PLAIN),
    "scales of caches": ({}, STATE | SCALES, PLAIN),
    "a head of values": ({}, STATE | VALUE_HEAD, PLAIN),
    "names without a prefix": ({}, renamed(STATE, bare), PLAIN),
    "names of which some have no prefix": (
        {},
        renamed(STATE, lambda name: bare(name) if ".0." in name else name),
        PLAIN,
    ),
    "names with two prefixes": ({}, renamed(STATE, lambda name: f"model.{name}"), PLAIN),
    "a base model": (TIED | {"architectures": ["LlamaModel"]}, renamed(without(STATE, HEAD), bare), ALIKE),
    "a base model with a head": ({"architectures": ["LlamaModel"]}, STATE, PLAIN),
    "no epsilon": ({"rms_norm_eps": None}, STATE, ({"rms_norm_eps": 1e-6}, STATE)),
    "no positions": ({"max_position_embeddings": None}, STATE, PLAIN),
    "no classes": ({"architectures": None}, STATE, PLAIN),
    "float64": ({"dtype": "float32"}, {name: tensor.double() for name, tensor in STATE.items()}, PLAIN),
    "float64 of some": ({"dtype": "float32"}, {**STATE, HEAD: STATE[HEAD].double()}, PLAIN),
}


def write(folder, changes, state):
    config = {name: value for name, value in (BASE | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def logits_of(folder):
    target = load_transformer(open_checkpoint(folder), "float32", CPU)
    cache = target.new_cache()
    return target.forward(TreeBatch.chains([IDS], CPU), cache, cache.batch([cache.allocate(len(IDS))], [0])).scores


def loaded(folder, layout):
    """Logits of a layout; only one of another head than the embedding warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = logits_of(write(folder, *LAYOUTS[layout][:2]))
    told = [str(each.message) for each in caught]
    assert [DIFFERS in each for each in told] == [True] * (layout == "tied with another head"), told
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_bits_of_the_model_it_stands_for(tmp_path, layout):
    assert torch.equal(loaded(tmp_path, layout), logits_of(write(tmp_path, *LAYOUTS[layout][2])))


@pytest.mark.parametrize("layout", wide(LAYOUTS, 4))
def test_a_folder_gives_the_logits_of_transformers(tmp_path, layout):
    transformers = pytest.importorskip("transformers")
    found = loaded(tmp_path, layout)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.5 and (found - expected).abs().max() < 1e-4


def test_different_models_have_different_logits(tmp_path):
    """The other way round: an ignored field or tensor would be noticed."""
    plain, *others = (logits_of(write(tmp_path, *each)) for each in (PLAIN, ALIKE, LAYOUTS["no epsilon"][2]))
    assert all((other - plain).abs().max() > 1e-3 for other in others)


@pytest.mark.parametrize(
    ("changes", "state", "message"),
    [
        ({}, without(STATE, HEAD), r"'lm_head.weight' is missing"),
        ({"architectures": ["LlamaModel"]}, renamed(without(STATE, HEAD), bare), "'lm_head.weight' is missing"),
        (TIED, without(STATE, EMBEDDING, HEAD), r"'model.embed_tokens.weight' is missing"),
        ({}, without(STATE, EMBEDDING), r"'model.embed_tokens.weight' is missing"),
        ({}, {**STATE, "norm.weight": torch.ones(64)}, "both are 'model.norm.weight'"),
        ({}, {**STATE, "v_heads.weight": torch.ones(64)}, "'v_heads.weight' is unexpected"),
        ({}, {**STATE, "model.layers.0.mlp.k_scale": torch.ones(1)}, "'model.layers.0.mlp.k_scale' is unexpected"),
        ({}, {**STATE, "model.layers.0.self_attn.weight_scale": torch.ones(1)}, "weight_scale' is unexpected"),
        ({}, {**STATE, "model.norm.weight": torch.ones(64, dtype=torch.int64)}, "'model.norm.weight' has type int64"),
        ({"architectures": ["GemmaModel"]}, STATE, "architectures' must be one of"),
        (TIED, {**STATE, HEAD: torch.ones(300, 64)}, r"'lm_head.weight' has shape \(300, 64\), expected"),
    ],
)  # fmt: skip
def test_other_folders_are_refused_by_name(tmp_path, changes, state, message):
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        warnings.simplefilter("ignore")
        open_checkpoint(write(tmp_path, changes, state))


def test_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    from specengine.models.config_hf import _HF_ARCHITECTURES, config_from_hf

    for name, architecture in _HF_ARCHITECTURES.items():
        family = name.replace("LLaMA", "Llama").removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        family += "Text" * family.startswith("Qwen3_5")
        theirs = getattr(transformers, f"{family}Config")()
        for class_name in (name, name.replace("ForCausalLM", "Model")):
            config = without(BASE, "rms_norm_eps", "max_position_embeddings") | {"architectures": [class_name]}
            config["num_hidden_layers"] = 4
            ours = config_from_hf(config)
            found = ours.architecture, ours.rms_norm_eps, ours.max_position
            assert found == (architecture, theirs.rms_norm_eps, theirs.max_position_embeddings)


def test_a_bin_file_of_float64_is_read_as_float32(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    torch.save({name: tensor.double() for name, tensor in STATE.items()}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in STATE.items())
    assert checkpoint.read(HEAD).dtype == torch.float32


def test_a_large_head_is_compared_to_its_last_row(tmp_path):
    state = {**STATE, EMBEDDING: torch.randn(5000, 64)}
    state[HEAD] = state[EMBEDDING].clone()
    folder = write(tmp_path, TIED | {"vocab_size": 5000}, state)
    assert open_checkpoint(folder).config.tie_embeddings
    state[HEAD][-1, -1] += 1
    with pytest.warns(UserWarning, match=DIFFERS):
        assert not open_checkpoint(write(folder, TIED | {"vocab_size": 5000}, state)).config.tie_embeddings


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_hybrid_without_prefixes_tied_with_its_head_alone_is_the_same_model(tmp_path, family):
    write_hybrid(tmp_path, family, num_hidden_layers=4, tie_word_embeddings=True)
    expected = logits_of(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state[HEAD] = state.pop(EMBEDDING)
    save_file(renamed(state, bare), tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3_5TextModel" if family == "qwen3_5" else "Qwen3NextModel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(tmp_path), expected)
    published = open_published(tmp_path)
    assert published.config.tie_embeddings and HEAD not in published.tensors and EMBEDDING in published.tensors
