"""Model names resolve as documented, and every answer of the hub becomes a folder, a file or one clear line."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from huggingface_hub import utils as hub_utils

from specengine.hub import huggingface as hub
from specengine.hub.huggingface import resolve_model
from specengine.types import ModelFetchError

# --- names ----------------------------------------------------------------------------------------


def test_local_folders_gguf_files_and_random_presets_resolve_to_themselves(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.touch()
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(tmp_path) == resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(file) == resolve_model(str(file)) == file
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model("random:tiny") == "random:tiny"


def test_a_home_folder_of_nobody_is_a_missing_one():
    with pytest.raises(FileNotFoundError, match="no such folder"):
        resolve_model("~nobody-of-this-name/model")


def test_an_embedded_name_wins_over_a_local_folder_of_the_same_name(tmp_path, monkeypatch):
    embedded = tmp_path / "cache" / "tiny.gguf"
    monkeypatch.setitem(hub.EMBEDDED, "tiny", None)
    monkeypatch.setattr(hub, "fetch_embedded", {"tiny": embedded}.get)
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny") == embedded
    assert resolve_model("./tiny") == resolve_model(Path("tiny")) == Path("tiny")


@pytest.mark.parametrize("name", ["nope", "", "smollm2"])
def test_an_unknown_name_is_an_error_that_lists_what_is_accepted(name):
    with pytest.raises(ValueError, match=f"unknown name '{name}'.*smollm2-135m.*gguf.*random:<preset>.*org/name"):
        resolve_model(name)


@pytest.mark.parametrize(
    "name", ["./nope", "a/b/c", "nope.gguf", "models/nope.gguf", "/no/such/folder", Path("org/name")]
)
def test_a_missing_path_is_a_file_not_found_error_that_names_it(name):
    with pytest.raises(FileNotFoundError, match=str(name)):
        resolve_model(name)


def test_a_file_that_is_no_gguf_is_rejected_by_name(tmp_path):
    file = tmp_path / "model.pt"
    file.touch()
    with pytest.raises(ValueError, match=r"model\.pt.*expected a folder or a GGUF file"):
        resolve_model(file)
    file.write_bytes(b"GGUF")  # as Ollama's files, whose names have no ending
    assert resolve_model(file) == file


# --- the hub --------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replaces the client by a repository of the given file names; returns the list of downloads."""

    def make(*names: str) -> list[str]:
        fetched: list[str] = []

        def fetch(repo: str, name: str) -> str:
            path = tmp_path / repo / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            fetched.append(name)
            return str(path)

        def snapshot(repo: str, **patterns: list[str]) -> str:
            for name in hub_utils.filter_repo_objects(names, **patterns):
                fetch(repo, name)
            return str(tmp_path / repo)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
        return fetched

    return make


def test_safetensors_are_preferred_and_nothing_else_is_downloaded(repository, tmp_path):
    fetched = repository(
        "config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "model.safetensors", "m.gguf",
        "pytorch_model.bin", "consolidated.safetensors", "params/a.json", "onnx/model.safetensors", "m.py",
    )  # fmt: skip
    assert resolve_model("org/name") == tmp_path / "org" / "name"
    assert sorted(fetched) == [
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
    ]


def test_bin_weights_are_downloaded_where_there_are_no_safetensors(repository):
    fetched = repository("config.json", "pytorch_model.bin", "training_args.bin", "optimizer.bin")
    resolve_model("org/name")
    assert set(fetched) == {"config.json", "pytorch_model.bin"}


def test_what_pard_2_adds_to_a_model_is_downloaded_beside_its_safetensors(repository):
    fetched = repository("config.json", "model.safetensors", "warp_model.bin", "pytorch_model.bin")
    resolve_model("org/name")
    assert sorted(fetched) == ["config.json", "model.safetensors", "warp_model.bin"]


def test_one_gguf_file_of_a_repository_is_asked_for_by_name(repository, tmp_path):
    fetched = repository("config.json", "m-Q4_0.gguf", "m-Q8_0.gguf")
    with pytest.raises(ModelFetchError, match=r"'org/name'.*org/name/file\.gguf"):
        resolve_model("org/name")
    assert resolve_model("org/name/m-Q8_0.gguf") == tmp_path / "org/name/m-Q8_0.gguf"
    assert "m-Q4_0.gguf" not in fetched
    fetched.clear()
    part = resolve_model("org/name/m-00002-of-00003.gguf")
    assert part.parent == tmp_path / "org/name"
    assert fetched == [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.GatedRepoError.__new__(hub_errors.GatedRepoError), "accept terms"),
        (
            hub_errors.RepositoryNotFoundError.__new__(hub_errors.RepositoryNotFoundError),
            "no such repository",
        ),
        (hub_errors.EntryNotFoundError("404"), r"has no file x\.gguf"),
        (ConnectionResetError("peer went away\nsecond line"), "peer went away$"),
    ],
    ids=["gated", "absent", "file absent", "connection"],
)
def test_a_failing_hub_is_one_line_that_names_the_model_and_the_way_out(monkeypatch, error, message):
    def fail(*args: object, **kwargs: object) -> None:
        assert hub_utils.are_progress_bars_disabled()
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    hub_utils.enable_progress_bars()
    bars_before = hub_utils.are_progress_bars_disabled()
    with pytest.raises(ModelFetchError, match=f"'org/name/x.gguf': no such local path, .*{message}") as caught:
        resolve_model("org/name/x.gguf")
    assert "\n" not in str(caught.value)
    assert hub_utils.are_progress_bars_disabled() == bars_before


def resolve_offline(name: str, hub_cache: Path) -> str:
    """Runs a process without a network and returns its output: the real client reads its settings on import."""
    code = (
        "import sys; from specengine.hub.huggingface import ModelFetchError, resolve_model\n"
        "try: print(resolve_model(sys.argv[1]))\n"
        "except ModelFetchError as error: print(error)"
    )
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(hub_cache),
        "PYTHONPATH": str(Path(hub.__file__).parents[2]),
    }
    command = [sys.executable, "-c", code, name]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def test_offline_a_hub_name_is_found_in_the_local_cache_or_the_error_says_how_to_get_it(tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name in ("config.json", "pytorch_model.bin"):
        (snapshot / name).touch()
    assert resolve_offline("org/name", tmp_path).strip() == str(snapshot)
    said = resolve_offline("org/other", tmp_path)
    for text in ("'org/other'", "cannot be reached", str(tmp_path), "hf download org/other"):
        assert text in said
