"""A build's output and progress can be followed in a file, as pip does not show them."""

import os
import subprocess
import sys

import pytest

from tests.packaging.build_scripts import loaded

build_log = loaded("build_log")
SAYS = [
    *(sys.executable, "-c"),
    "import os, sys; print('[1/2] one', file=sys.stderr); print(os.environ['NINJA_STATUS']); raise SystemExit(3)",
]


def test_the_log_has_what_the_build_prints_and_its_first_line_says_where_it_is(tmp_path, capsys):
    path = tmp_path / "cache" / "build.log"
    with build_log.BuildLog(path) as log:
        with pytest.raises(subprocess.CalledProcessError):
            log.run(SAYS, os.environ)
        while_open = path.read_text(encoding="utf-8")
    lines = while_open.splitlines()
    assert lines[0].endswith(f"tail -F {path}")
    assert lines[1:3] == ["[1/2] one", build_log.PROGRESS] and lines[3].endswith("with status 3")
    assert capsys.readouterr().out == while_open == path.read_text(encoding="utf-8")


def test_the_users_form_of_progress_is_kept(tmp_path):
    with build_log.BuildLog(tmp_path / "log") as log, pytest.raises(subprocess.CalledProcessError):
        log.run(SAYS, os.environ | {"NINJA_STATUS": "mine "})
    assert "mine" in (tmp_path / "log").read_text(encoding="utf-8")


def test_a_disk_that_fills_up_costs_the_rest_of_the_log(tmp_path, capsys):
    with build_log.BuildLog(tmp_path / "log") as log, open("/dev/full", "w") as full:
        log._outputs[1] = full
        log.run([sys.executable, "-c", "print('compiled')"], os.environ)
        with pytest.raises(OSError, match="No space"):
            full.close()
    said = capsys.readouterr().out
    assert said.count("the log ends here") == 1 and "compiled" in said


def test_a_second_build_has_a_new_log(tmp_path):
    path = tmp_path / "build.log"
    with build_log.BuildLog(path) as first, build_log.BuildLog(path) as second:
        first.say("of the first")
        second.say("of the second")
        assert "of the first" not in path.read_text(encoding="utf-8")
        assert "of the second" in path.read_text(encoding="utf-8")


def test_a_folder_that_cannot_be_written_costs_the_log_alone(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way of a folder")
    with build_log.BuildLog(tmp_path / "file" / "build.log") as log:
        log.run([sys.executable, "-c", "print('compiled')"], os.environ)
    said = capsys.readouterr().out
    assert "the build has no log" in said and "compiled" in said
