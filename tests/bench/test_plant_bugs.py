"""Planted bugs: the list fits the code, and the script reports who catches a bug."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"cpu", "cuda", "python"}


@pytest.fixture(scope="module")
def script():
    """bench/plant_bugs.py, which imports a program beside it."""
    spec = importlib.util.spec_from_file_location("plant_bugs", ROOT / "bench" / "plant_bugs.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        patch.setitem(sys.modules, "plant_bugs", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(tmp_path, script):
    """A copy with one source, whose tests catch a wrong sum, a hang and a crash."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef same(a):\n    return a\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_other.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "tests" / "test_sums.py").write_text(
        "import pathlib\n"
        "exec(pathlib.Path(__file__).parents[1].joinpath('src', 'sums.py').read_text())\n"
        "def test_add():\n    assert add(2, 3) == 5\n"
    )

    class SmallCopy(script.Copy):
        def _bring_up_to_date(self):
            (tmp_path / "bench").symlink_to(ROOT / "bench")

        def build(self, kind):
            return 0.0

    return SmallCopy(tmp_path)


def bug_of(script, old, new, tests="tests/test_sums.py"):
    return script.Bug("a bug", "python", "sums", "src/*.py", old, new, tuple(tests.split()))


def test_every_bug_has_its_text_once_and_tests_that_exist(script):
    bugs = script.read_bugs(script.LISTS)
    assert {bug.kind for bug in bugs} == KINDS
    for kind in KINDS:
        assert sum(bug.kind == kind for bug in bugs) >= 20, kind
    for bug in bugs:
        assert bug.place(ROOT).is_file()
        assert bug.test_files(ROOT), bug.name


@pytest.mark.parametrize(("old", "times"), [("return a", 2), ("return nothing", 0)], ids=["twice", "never"])
def test_a_text_that_does_not_occur_once_is_refused(script, small, old, times):
    with pytest.raises(ValueError, match=rf"a bug: expected its text once in src/\*\.py, found it {times} times"):
        bug_of(script, old, "return None").place(small.folder)


def test_a_missing_test_file_is_refused(script, small):
    with pytest.raises(ValueError, match=r"no test file is called tests/test_gone\.py"):
        bug_of(script, "a + b", "a - b", "tests/test_gone.py").test_files(small.folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("new", "how"),
    [
        ("a - b", "failed"),
        ("__import__('time').sleep(600)", "hang"),
        ("__import__('os').abort()", "crash"),
    ],
)
def test_a_bug_is_caught_by_the_test_that_fails_hangs_or_crashes(script, small, new, how):
    before = (small.folder / "src" / "sums.py").read_text()
    row = script.plant(small, bug_of(script, "a + b", new), "files", hang=10)
    assert (row["caught_by"], row["how"], row["stage"]) == ("tests/test_sums.py::test_add", how, "files")
    assert (small.folder / "src" / "sums.py").read_text() == before


@pytest.mark.full
def test_further_stages_run_where_the_first_tests_pass(script, small):
    row = script.plant(small, bug_of(script, "a + b", "a - b", "tests/test_other.py"), "folders", hang=30)
    assert (row["caught_by"], row["stage"], len(row["passed"])) == ("tests/test_sums.py::test_add", "folders", 1)


@pytest.mark.full
def test_a_bug_that_changes_nothing_is_missed(script, small):
    row = script.plant(small, bug_of(script, "a + b", "b + a"), "files", hang=30)
    assert (row["caught_by"], row["tests"]) == (None, 1)
    assert "0 of 1 bugs are caught" in script.table([row])


@pytest.mark.full
def test_a_catcher_that_fails_without_the_bug_is_refused(script, small):
    rows = [{"kind": "python", "caught_by": "tests/test_sums.py::test_add"}, {"kind": "cpu", "caught_by": "gone.py"}]
    assert script.control(small, rows, "python", hang=30) == 1
    (small.folder / "src" / "sums.py").write_text("def add(a, b):\n    return 0\n")
    with pytest.raises(RuntimeError, match=r"the clean copy fails tests/test_sums\.py::test_add too \(failed\)"):
        script.control(small, rows, "python", hang=30)


def test_unknown_names_are_refused_before_anything_is_copied(tmp_path):
    command = [sys.executable, str(ROOT / "bench" / "plant_bugs.py"), str(tmp_path / "out.json")]
    result = subprocess.run([*command, "--bugs", "no such bug"], text=True, capture_output=True)
    assert result.returncode == 2
    assert "--bugs: no such bug: expected names of" in result.stderr


@pytest.mark.full
def test_the_record_has_a_line_for_each_bug_and_tells_what_is_missed_since(script, tmp_path):
    rows = {name: {"name": name, "caught_by": by} for name, by in {"one": "a", "two": "b", "three": None}.items()}
    out = tmp_path / "out.json"
    script.write(out, rows, commit="abc")
    assert json.loads(out.read_text()) == {"commit": "abc", "planted_bugs": [*rows.values()]}
    assert sum('"name"' in line for line in out.read_text().splitlines()) == len(rows)
    assert script.read(out) == rows and script.read(tmp_path / "none.json") == {}
    now = [{**row, "caught_by": None if row["name"] != "one" else "c"} for row in rows.values()]
    assert script.missed_since(out, now) == ["two"] and script.missed_since(out, rows.values()) == []


def test_rooms_take_turns(script):
    bugs = [script.Bug(name, "cpu", room, "", "", "x", ()) for name, room in {"a": "1", "b": "1", "c": "2"}.items()]
    assert [bug.name for bug in script.in_turns(bugs)] == ["a", "c", "b"]
