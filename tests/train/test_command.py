"""`specengine train` from dialogues to a drafter's folder."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from specengine import Engine, SamplingParams
from specengine.cli.main import app
from specengine.cli.train import train
from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.models.quantised.packed_weights import FILENAME
from specengine.train.data.dialogue_files import write_shard
from specengine.train.data.dialogues import DialogueConfig
from specengine.train.objectives.registry import OBJECTIVES
from tests.engines import ids
from tests.models.files import CONFIG_JSON
from tests.train.runs import CHECKPOINT, CONFIG, dialogues


@pytest.fixture
def target(tmp_path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    shape = {"num_hidden_layers": CONFIG.num_layers, "vocab_size": CONFIG.vocab_size}
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | shape))
    save_file({name: CHECKPOINT.read(name) for name in CHECKPOINT.tensors}, folder / "model.safetensors")
    return folder


def run(*arguments):
    torch.set_num_threads(1)
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def data(folder: Path, target: Path, seed: int = 0) -> Path:
    folder.mkdir()
    about = {"model": str(target), "config": json.dumps(asdict(DialogueConfig())), "questions": "0"}
    write_shard(folder / "dialogues-00000.safetensors", dialogues(16, seed), about)
    return folder


NAME = "layers.1.mlp.up_proj.weight"  # of a drafter
OPTIONS = ("--tokens=100", "--held-out=3", "--vocabulary=64", "--batch-tokens=64", "--rows=96", "--device=cpu")


def test_the_help_names_every_drafter_that_can_be_trained():
    help_text = get_type_hints(train, include_extras=True)["drafter"].__metadata__[0].help
    assert set(re.findall(r"[\w-]+", help_text.partition("[")[0])) == {*OBJECTIVES, "or"}


@pytest.mark.full
def test_a_run_ends_with_a_drafter_a_log_a_picture_and_a_card(tmp_path, target):
    pytest.importorskip("matplotlib")
    given = ("--target", target, "--data", data(tmp_path / "data", target), *OPTIONS, "--storage=int8")
    result = run("--drafter=fasteagle,levels=2", "--out", tmp_path / "out", *given)
    assert result.exit_code == 0, result.output
    assert "finished, step 4 of 4" in result.output
    config = json.loads((tmp_path / "out/config.json").read_text())
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert (config["num_hidden_layers"], config["eagle_aux_hidden_state_layer_ids"]) == (2, [2, 3, 4])
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == 64
    assert 12 < config["trained_length"] < 32 and config["max_position_embeddings"] == CONFIG.max_position
    assert tensors["layers.1.mlp.up_proj.weight"].dtype == torch.int8
    assert tensors["layers.1.mlp.up_proj.weight_scale"].shape == (160, 2)
    assert (tmp_path / "out/training.png").stat().st_size > 10000
    card = (tmp_path / "out/README.md").read_text()
    assert "13 dialogues" in card and "3 others held out" in card and "| 2 |" in card
    again = run("--drafter=fasteagle,levels=2", "--out", tmp_path / "out", *given)
    assert "finished, step 4 of 4" in again.output
    other = run("--drafter=fasteagle,levels=3", "--out", tmp_path / "out", *given)
    assert other.exit_code == 2 and "holds another run" in other.output


@pytest.mark.full
def test_runs_of_several_seeds_share_their_dialogues(tmp_path, target):
    given = ("--drafter=medusa,heads=2", "--target", target, "--data", data(tmp_path / "data", target), *OPTIONS)
    refused = run("--out", tmp_path / "refused", *given, "--seed=1")
    assert refused.exit_code == 2 and '"seed": 1' in refused.output
    for out, seed in (("zero", 0), ("one", 1)):
        result = run("--out", tmp_path / out, *given, f"--seed={seed}", "--data-seed=0")
        assert result.exit_code == 0, result.output
    zero, one = (load_file(tmp_path / out / "model.safetensors") for out in ("zero", "one"))
    assert zero.keys() == one.keys() and any(not zero[name].equal(one[name]) for name in zero)


@pytest.mark.full
def test_a_run_goes_on_from_an_earlier_drafter_on_other_data(tmp_path, target):
    given = ("--drafter=eagle3,levels=2", "--target", target, *OPTIONS)
    first = run("--out", tmp_path / "first", "--data", data(tmp_path / "data", target), *given)
    assert first.exit_code == 0, first.output
    other = ("--data", data(tmp_path / "other", target, seed=5), *given, "--learning-rate=1e-12")
    fresh = run("--out", tmp_path / "fresh", *other)
    second = run("--out", tmp_path / "second", *other, "--start", tmp_path / "first")
    assert fresh.exit_code == second.exit_code == 0, second.output
    before, anew, after = (load_file(tmp_path / run / "model.safetensors") for run in ("first", "fresh", "second"))
    # Rate 0 leaves the first weights. The other data has other frequent tokens: rows of tokens that the first drafter
    # did not have are the target's.
    layer = [name for name in before if name not in ("lm_head.weight", "d2t", "t2d")]
    assert all(torch.equal(before[name], after[name]) for name in layer)
    assert not all(torch.equal(before[name], anew[name]) for name in layer)
    known, now = ((run["d2t"] + torch.arange(64)).tolist() for run in (before, after))
    assert now == (anew["d2t"] + torch.arange(64)).tolist() and 0 < len(set(now) - set(known)) < 64
    for row, token in enumerate(now):
        expected = before["lm_head.weight"][known.index(token)] if token in known else anew["lm_head.weight"][row]
        assert torch.equal(after["lm_head.weight"][row], expected)
    third = run("--out", tmp_path / "third", *other, "--start", tmp_path / "first", "--keep-vocabulary")
    assert third.exit_code == 0, third.output
    kept = load_file(tmp_path / "third/model.safetensors")
    assert torch.equal(kept["d2t"], before["d2t"]) and torch.equal(kept["lm_head.weight"], before["lm_head.weight"])
    falling = alone(tmp_path / "first", tmp_path / "falling") / "model.safetensors"
    tensors = load_file(falling)
    tokens = (tensors["d2t"] + torch.arange(64)).flip(0)
    save_file(tensors | {"d2t": tokens - torch.arange(64)}, falling, {"format": "pt"})
    refused = run("--out", tmp_path / "refused", *other, "--start", falling.parent, "--keep-vocabulary")
    assert refused.exit_code == 2 and "keep-vocabulary: expected rising tokens" in refused.output
    refused = run("--out", tmp_path / "refused", *other, "--keep-vocabulary")
    assert refused.exit_code == 2 and "keep-vocabulary: expected a drafter" in refused.output
    card = (tmp_path / "second/README.md").read_text()
    assert card.count("- Command: ") == 2 and "- Went on from an earlier drafter:\n  - Data: " in card


def alone(run, folder):
    """Copies a run's drafter as it is published, without the files that resume the training."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(run / name, folder)
    return folder


@pytest.mark.full
def test_a_run_goes_on_from_a_drafter_that_was_published(tmp_path, target):
    given = ("--target", target, "--data", data(tmp_path / "data", target), *OPTIONS, "--storage=float32")
    spec = "--drafter=eagle3,levels=2"
    assert run(spec, "--out", tmp_path / "first", *given).exit_code == 0
    alone(tmp_path / "first", tmp_path / "drafter")
    still = ("--learning-rate=1e-12", "--start", tmp_path / "drafter")
    second = run(spec, "--out", tmp_path / "second", *given, *still)
    assert second.exit_code == 0, second.output
    before, after = (load_file(tmp_path / run / "model.safetensors") for run in ("first", "second"))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name].double(), after[name].double(), atol=1e-6) for name in before)
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    (tmp_path / "drafter/config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    third = run(spec, "--out", tmp_path / "third", *given, *still)
    assert third.exit_code == 2 and "has rope_theta 77.0, expected " in " ".join(third.output.split())


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("nothing", "nothing"),
        ("target", "unlike this run's"),
        ("first", "another network"),
        ("first/drafter", "has no tensor '2.0.linear.bias'"),
    ],
)
def test_a_start_that_does_not_fit_is_named(tmp_path, target, start, message):
    given = ("--target", target, "--data", data(tmp_path / "data", target), *OPTIONS)
    assert run("--drafter=medusa,heads=2", "--out", tmp_path / "first", *given).exit_code == 0
    alone(tmp_path / "first", tmp_path / "first/drafter")
    result = run("--drafter=medusa,heads=3", "--out", tmp_path / "out", *given, "--start", tmp_path / start)
    assert result.exit_code == 2 and message in result.output


def test_a_folder_of_something_else_is_left_alone(tmp_path, target):
    before = (target / "config.json").read_bytes(), (target / "model.safetensors").read_bytes()
    given = ("--drafter=medusa,heads=2", "--target", target, "--data", data(tmp_path / "data", target), *OPTIONS)
    result = run("--out", target, *given)
    assert result.exit_code == 2 and "has a config.json of another model" in result.output
    assert before == ((target / "config.json").read_bytes(), (target / "model.safetensors").read_bytes())
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        result = run("--out", tmp_path / place, *given)
        assert result.exit_code == 2 and f"error: out: {tmp_path / place} cannot be made" in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"\n", "holds no questions"),
        (b'{"prompt": 5}', "line 1: expected an object"),
        (b'{"turns": [[1]]}', "line 1: expected an object"),
        (b'{"turns": ["why", 1]}', "line 1: expected an object"),
        (b'{"turns": []}', "line 1: expected an object"),
        (b'{"turns": "why"}', "line 1: expected an object"),
    ],
)
def test_a_file_that_holds_no_questions_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "questions").write_bytes(content)
    result = run("--drafter=medusa", "--out", tmp_path / "out", "--prompts", tmp_path / "questions")
    assert result.exit_code == 2 and "error: prompts: " in result.output and message in result.output


@pytest.mark.quick(1)
@pytest.mark.parametrize("folder, damaged", [("data", "dialogues-*"), ("data", "states/*/*"), ("out", "checkpoints/*")])
def test_files_that_cannot_be_read_are_named(tmp_path, target, folder, damaged):
    given = ("--drafter=medusa,heads=2", "--target", target, "--data", data(tmp_path / "data", target), *OPTIONS)
    assert run("--out", tmp_path / "out", *given).exit_code == 0
    for path in (tmp_path / folder).glob(damaged):
        torch.save([1], path)
    result = run("--out", tmp_path / ("out" if folder == "out" else "other"), *given)
    assert result.exit_code == 2 and f"error: {folder}: " in result.output


@pytest.mark.full
@pytest.mark.parametrize("store", ["memory", "none"])
def test_states_need_not_be_kept_on_disk(tmp_path, target, store):
    given = ("--target", target, "--data", data(tmp_path / "data", target), *OPTIONS, f"--store={store}")
    assert run("--drafter=fasteagle,levels=1", "--out", tmp_path / "out", *given).exit_code == 0
    assert not (tmp_path / "data/states").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--drafter=prompt_lookup", "drafter: 'prompt_lookup' cannot be trained, expected one of dflash"),
        ("--drafter=fasteagle,depth=3", "has no option 'depth'"),
        ("--drafter=fasteagle:folder", "has no path"),
        ("--store=tape", "store: expected disk, memory, none"),
        ("--schedule=flat", "schedule: expected cosine or linear"),
        ("--tokens=0", "tokens: expected an integer from 1"),
        ("--vocabulary=-1", "vocabulary: expected an integer from 0"),
        ("--epochs=-1", "epochs: expected an integer from 0"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_loaded(tmp_path, wrong, message):
    result = run("--drafter=fasteagle", "--out", tmp_path / "out", "--target=random:no-such-model", wrong)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("fasteagle", "target: the drafter reads three rising layers, 2 layers give (2, 1, -1)"),
        ("eagle3", "target: the drafter reads three rising layers, 2 layers give (2, 1, -1)"),
        ("glide,layers=3", "drafter: layers: expected an integer from 1 to 2, got 3"),
        ("draft-model,layers=3", "drafter: layers: expected an integer from 1 to 2, got 3"),
    ],
)
def test_a_target_with_too_few_layers_is_refused_before_data_is_made(tmp_path, drafter, message):
    given = ("--target=random:tiny-llama", "--data", tmp_path / "data", *OPTIONS)
    result = run(f"--drafter={drafter}", "--out", tmp_path / "out", *given)
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "data").exists()


def test_a_command_without_steps_packs_an_earlier_drafter_and_drafts_change_no_token(tmp_path, target, monkeypatch):
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    given = ("--drafter=fasteagle,levels=2", "--target", target, "--data", data(tmp_path / "data", target), *OPTIONS)
    assert run("--out", plain, *given, "--storage=int8").exit_code == 0
    again = (*given, "--out", packed, "--start", plain, "--epochs=0", "--storage=packed", "--base", "../plain")
    for _ in range(2):  # the second run finds the work done
        result = run(*again)
        assert result.exit_code == 0 and "finished, step 0 of 0" in result.output, result.output
        assert sorted(x.name for x in packed.iterdir() if x.is_file()) == [
            *("README.md", "config.json", FILENAME, "training.jsonl")
        ]
    result = run("--out", packed, *given, "--storage=int8")
    assert result.exit_code == 2 and "storage: " in result.output and "has packed weights" in result.output
    before, after = open_draft_checkpoint(plain), open_draft_checkpoint(packed)
    tensors = load_file(plain / "model.safetensors")
    save_file(tensors | {NAME: -tensors[NAME]}, packed / "model.safetensors")  # of a later run that has yet to pack
    assert torch.equal(open_draft_checkpoint(packed).read(NAME), -before.read(NAME))
    (packed / "model.safetensors").unlink()
    assert after.tensors == before.tensors
    assert (after.read(NAME) - before.read(NAME)).abs().max() < 0.1 * before.read(NAME).abs().max()
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    outputs = [
        Engine(target, drafter=drafter).generate([[5, 6, 7]], params)
        for drafter in ("none", f"fasteagle:{packed},adaptive=false")
    ]
    assert ids(outputs[0]) == ids(outputs[1])


def test_bases_need_packed_storage(tmp_path, target):
    result = run("--drafter=medusa", "--target", target, "--out", tmp_path / "out", "--base", "../plain")
    assert result.exit_code == 2 and "base: " in result.output
