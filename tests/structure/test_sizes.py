"""Sizes that a reader can take in: of the README, of files, of the cycle."""

from pathlib import Path

import pytest

from tests.structure.source import PACKAGE, ROOT

MOST_README_LINES = 140
MOST_FILE_LINES = 350
MOST_FILES_AT_THE_TOP = 5
MOST_CYCLE_LINES = 60
CODE = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".html", ".js", ".css")
README, CYCLE = "README.md", f"{PACKAGE}/engine/cycle.py"
WRITTEN = f"{PACKAGE}/_C/__init__.pyi"  # by csrc/bindings/write_stub.py


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def code_files(root: Path) -> list[Path]:
    """Sources of the package and of the core; what a program writes is none."""
    files = (path for folder in (PACKAGE, "csrc") for path in sorted((root / folder).rglob("*")))
    return [path for path in files if path.suffix in CODE and path.is_file() and path != root / WRITTEN]


def too_long(root: Path) -> list[str]:
    limits = {root / README: MOST_README_LINES, root / CYCLE: MOST_CYCLE_LINES}
    files = [root / README, *code_files(root)]
    counts = {path: lines(path) for path in files}
    wrong = [(path, count) for path, count in counts.items() if count > limits.get(path, MOST_FILE_LINES)]
    return [f"{path.relative_to(root)}: {count} lines" for path, count in wrong]


def files_at_the_top(root: Path) -> list[str]:
    return sorted(path.name for path in (root / PACKAGE).iterdir() if path.is_file() and path.suffix != ".so")


def test_no_file_is_too_long():
    assert not too_long(ROOT), "\n".join(too_long(ROOT))


def test_few_files_lie_beside_the_rooms():
    assert len(files_at_the_top(ROOT)) <= MOST_FILES_AT_THE_TOP


def test_the_files_that_have_limits_exist():
    assert (ROOT / README).is_file() and (ROOT / CYCLE).is_file()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree that keeps all limits, each of them just so."""
    write(tmp_path / README, MOST_README_LINES)
    write(tmp_path / CYCLE, MOST_CYCLE_LINES)
    write(tmp_path / "csrc" / "long.cu", MOST_FILE_LINES)
    for number in range(MOST_FILES_AT_THE_TOP):
        write(tmp_path / PACKAGE / f"file{number}.py", 1)
    return tmp_path


def write(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("line\n" * count, encoding="utf-8")


def test_a_tree_within_the_limits_is_accepted(tree):
    assert not too_long(tree) and len(files_at_the_top(tree)) == MOST_FILES_AT_THE_TOP


@pytest.mark.parametrize("name, most", [(README, 140), (CYCLE, 60), ("csrc/long.cu", 350), (f"{PACKAGE}/api.py", 350)])
def test_a_file_that_is_too_long_is_noticed(tree, name, most):
    write(tree / name, most + 1)
    assert too_long(tree) == [f"{name}: {most + 1} lines"]


def test_a_file_too_many_beside_the_rooms_is_noticed(tree):
    write(tree / PACKAGE / "stray.py", 1)
    assert len(files_at_the_top(tree)) > MOST_FILES_AT_THE_TOP
