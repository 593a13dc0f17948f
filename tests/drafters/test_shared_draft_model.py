"""Draft models of layers alone, between the target's embedding and head."""

import json

import pytest
import torch
from safetensors.torch import save_file

from specengine.engine.engine import Engine
from specengine.models.checkpoint import open_checkpoint
from specengine.models.presets import PRESETS
from specengine.tensor_parallel.loading import load_model
from specengine.types import SamplingParams

TARGET = "random:tiny-llama"
CONFIG = PRESETS["tiny-llama"]
PROMPTS = [[5, 9, 17, 33], [8, 8, 40]]


def write_layers(folder, model, layers, **changes):
    """A checkpoint of some of the target's own layers."""
    checkpoint = open_checkpoint(TARGET)
    tensors = {"model.norm.weight": checkpoint.read("model.norm.weight").float()}
    for i, layer in enumerate(layers):
        own = f"model.layers.{layer}."
        tensors |= {
            name.replace(own, f"model.layers.{i}."): checkpoint.read(name).float()
            for name in checkpoint.tensors
            if name.startswith(own)
        }
    c = model.config
    config = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_position,
        "shared_with_target": ["model.embed_tokens.weight", "lm_head.weight"],
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def target():
    return load_model(TARGET, dtype="float32", device="cpu")


def generate(target, drafter):
    torch.set_num_threads(1)
    params = SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True)
    return Engine(target, drafter=drafter).generate(PROMPTS, params)


def test_with_all_layers_everything_is_accepted(target, tmp_path):
    folder = write_layers(tmp_path / "all", target, range(CONFIG.num_layers))
    plain, drafted = generate(target, "none"), generate(target, f"draft-model:{folder},length=3,adaptive=false")
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert min(other.stats.acceptance_by_depth) == 1


def test_it_drafts_as_the_target_s_first_layers_do(target, tmp_path):
    folder = write_layers(tmp_path / "first", target, [0])
    ours, theirs = (generate(target, f"draft-model:{path},adaptive=false") for path in (folder, "self,layers=1"))
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.acceptance_by_depth == other.stats.acceptance_by_depth


def test_it_drafts_past_the_length_of_its_training_texts(target, tmp_path):
    ours, theirs = (
        generate(target, f"draft-model:{write_layers(tmp_path / name, target, [0], **more)}")
        for name, more in (("short", {"trained_length": 9}), ("long", {}))
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.stats.acceptance_by_depth == other.stats.acceptance_by_depth


def test_layers_that_are_not_all_there_are_refused(target, tmp_path):
    folder = write_layers(tmp_path / "short", target, [0], num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"^drafter: .*'model.layers.1.input_layernorm.weight' is missing"):
        generate(target, f"draft-model:{folder}")


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size"])
def test_layers_of_another_target_are_refused(target, tmp_path, name):
    folder = write_layers(tmp_path / "other", target, [0], **{name: 4 * getattr(target.config, name)})
    with pytest.raises(ValueError, match=f"drafter: .*{name} is .*, the target's is"):
        generate(target, f"draft-model:{folder}")
