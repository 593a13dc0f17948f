"""Writes docs/files.md, the map of the sources: python docs/make_files.py

Each line is the first sentence of a file's docstring or head comment.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"
FOLDERS = ("specengine", "csrc", "bench", "recipes", "tests/simulator/csrc")  # subfolders included
KINDS = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".sh", ".html")
WITHOUT_HEAD = {
    "specengine/server/page.html": "The chat page: one file with its script and style.",
    "specengine/_C/__init__.pyi": "The types of the built core.",
    "tests/simulator/csrc/sim/shared.cpp": "The shared memory of a simulated block, with its reads and writes checked.",
    "tests/simulator/csrc/sim/tensors.cpp": "The tensors that a simulated op may access.",
}
COLUMNS = 145
ENTRY = re.compile(r"^- `([\w.]+)`: (?=\S)", re.M)
HEADING = re.compile(r"^## `([\w./]+)/`$", re.M)
INTRODUCTION = """\
# Files

One line per file, written by `python docs/make_files.py` from the head of each file. [Layout](design/layout.md) has
the folders and their order, [Documentation](README.md#where-is-) a table of common questions.

Beside these folders:

- `setup.py`, `CMakeLists.txt` and `pyproject.toml` build the core.
- `.ci/run` is everything that must pass, `.ci/sanitize` runs the ops under sanitizers, `.ci/ptxas` reads registers
  and spills of the CUDA kernels, `.ci/sass` their machine code.
- `specengine/checkpoints` holds the shipped drafters, each with a card.
- `tests` mirrors the sources, and `bench/results` holds recorded runs.
"""


def sources() -> list[Path]:
    """Lists the files that belong on the page; empty files and build outputs do not."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in found if path.suffix in KINDS and path.stat().st_size and not _is_output(path))


def gloss(path: Path) -> str:
    """Returns the first sentence of a file's head.

    A source without one implements the header of its name. Raises ValueError if there is no such header.
    """
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    if name in WITHOUT_HEAD:
        return WITHOUT_HEAD[name]
    head = _docstring(text) if path.suffix in (".py", ".pyi") else _comment(text)
    if not head and (header := next((ROOT / name.partition("csrc")[0] / "csrc").rglob(f"{path.stem}.h"), None)):
        return f"Implements `{header.relative_to(ROOT).as_posix()}`."
    if not head:
        raise ValueError(f"{name}: no docstring or comment at its head")
    sentence = re.split(r"(?<=\.)\s|\n\n", head.strip(), maxsplit=1)[0]
    return " ".join(sentence.split()).rstrip(".:;") + "."


def page(paths: Iterable[Path]) -> str:
    """Returns the page: a heading per folder, an entry per file."""
    lines, folder = [INTRODUCTION.rstrip()], None
    for path in sorted(paths, key=lambda path: (FOLDERS.index(_root(path)), path.parent.as_posix(), path.name)):
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"## `{folder.relative_to(ROOT).as_posix()}/`", ""]
        entry = f"- `{path.name}`: {gloss(path)}"
        lines += textwrap.wrap(entry, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, ""])


def listed(text: str) -> Iterator[str]:
    """Yields the path of every entry of a page."""
    parts = HEADING.split(text)
    for folder, entries in zip(parts[1::2], parts[2::2], strict=True):
        yield from (f"{folder}/{name}" for name in ENTRY.findall(entries))


def _root(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return next(folder for folder in FOLDERS if name.startswith(f"{folder}/"))


def _is_output(path: Path) -> bool:
    return "__pycache__" in path.parts or "build" in path.relative_to(ROOT).parts


def _docstring(text: str) -> str:
    return ast.get_docstring(ast.parse(text)) or ""


def _comment(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("#!")]
    head = []
    for line in lines:
        found = re.match(r"(?://|# ?)\s?(.*)", line)
        if not found or line.startswith(("#pragma", "#include")):
            break
        head.append(found[1])
    return "\n".join(head)


if __name__ == "__main__":
    PAGE.write_text(page(sources()), encoding="utf-8")
