"""Draft models of layers alone, between the target's embedding and head."""

import pytest
import torch

from specengine.engine.engine import Engine
from specengine.models.presets import PRESETS
from specengine.tensor_parallel.loading import load_model
from specengine.types import SamplingParams
from tests.drafters.shared_layers import TARGET, write_layers

CONFIG = PRESETS["tiny-llama"]
PROMPTS = [[5, 9, 17, 33], [8, 8, 40]]


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
        generate(target, f"draft-model:{write_layers(tmp_path / name, target, [0], **more)},adaptive=false")
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
