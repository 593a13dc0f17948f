"""Kills, full disks and folders that cannot be written: nothing half-written is ever read, and the next run works."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specengine.bench.report.writing import write_json
from specengine.drafters.suffix.corpus_file import write_corpus
from specengine.train.run_state import save_state
from specengine.utils.atomic_file import atomic_file
from tests.faults.jobs import JOBS

ROOT = Path(__file__).resolve().parents[2]
every_job = pytest.mark.parametrize("name", JOBS)


class Writer:
    """Asks a process of `writer` for forks of it."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # no thread but the one that forks
        command = [sys.executable, "-m", "tests.faults.writer"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)
        assert self.line() == "ready"

    def line(self) -> str:
        said = self.process.stdout.readline().strip()
        assert said, f"the writer has ended, status {self.process.poll()}"
        return said

    def ask(self, name: str, folder: Path, most_bytes: int = 0) -> tuple[int, str]:
        """The fork, and the first thing it says."""
        self.process.stdin.write(json.dumps([name, str(folder), most_bytes]) + "\n")
        self.process.stdin.flush()
        said = sorted((self.line(), self.line()), key=str.isdigit)  # two processes print
        return int(said[1]), said[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "written"


@pytest.fixture(scope="module")
def writing() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.process.kill()
    made.process.communicate()


def kill(writing: Writer, folder: Path, name: str, times: int) -> int:
    """How many of the kills left a part of a file."""
    draw, torn = random.Random(name), 0
    for _ in range(times):
        began = time.monotonic()
        pid, said = writing.ask(name, folder)
        assert said == "writing"
        time.sleep(draw.random() * 2 * (time.monotonic() - began))  # of what one write took
        os.kill(pid, signal.SIGKILL)
        assert writing.line() == "ended"
        torn += bool([*folder.rglob(".*")])
        JOBS[name].check(folder)
        for part in folder.rglob(".*"):
            if part.is_file():
                part.unlink()
    return torn


@pytest.mark.quick(2)
@every_job
def test_a_kill_at_any_moment_leaves_whole_files_and_the_next_run_works(writing, folder, name):
    kill(writing, folder, name, times=6)


@pytest.mark.slow
@every_job
def test_of_many_kills_some_fall_into_a_write_and_none_does_harm(writing, folder, name):
    assert kill(writing, folder, name, times=100) > 0


@every_job
def test_a_full_disk_is_one_line_that_names_the_file_and_leaves_the_one_before(writing, folder, name):
    _, said = writing.ask(name, folder, 100_000_000)
    assert (said, writing.line()) == ("written", "ended")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    _, said = writing.ask(name, folder, 512)
    assert writing.line() == "ended"
    if name == "measurements":  # which are made again
        assert said == "written"
    else:
        assert "\\n" not in said and ("OSError" in said or "ModelFetchError: " in said)
        assert str(folder) in said
    left = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert left == {path: content for path, content in before.items() if path.suffix != ".lock"}
    JOBS[name].check(folder)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_json(folder / "results.json", {}),
        lambda folder: write_corpus(folder / "corpus", [[1, 2, 3]]),
        lambda folder: save_state(folder, 1, {"about": ""}),
    ],
    ids=["results", "corpus", "training checkpoint"],
)
def test_a_folder_that_is_a_file_is_an_error_that_names_it(tmp_path, write):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            write(folder)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_error_that_names_the_file(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match=r"results\.json"):
            write_json(tmp_path / "results.json", {})
    finally:
        tmp_path.chmod(0o700)


def test_a_file_whose_making_fails_is_not_put_in_place(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(KeyError), atomic_file(tmp_path / "file") as part:
        part.write_text("half")
        raise KeyError
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
