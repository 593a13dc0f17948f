"""The rooms of the package are layers: a module imports only from its own room and from those below it."""

from pathlib import Path

import pytest

from tests.structure.source import PACKAGE, ROOT, Module, imported_modules, modules

LAYERS = (
    *("utils", "types", "hub", "tokenizer", "rules", "draft_trees", "constraints", "ops", "cache", "models"),
    *("quantise", "tensor_parallel"),
    *("draft_policy", "drafters", "engine", "api", "train", "bench", "tool_calls", "server", "cli", "__main__"),
)
RANK = {room: rank for rank, room in enumerate(LAYERS)}
CORE = "_C"  # the compiled module, open to every layer


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def against_the_layers(root: Path) -> list[str]:
    """Imports that run upwards, one a line. The package's `__init__` is the facade over all rooms: it alone is free.

    No import from the facade is free, as the facade imports from every room.
    """
    found = modules(root)
    names = {module.name for module in found} | {f"{PACKAGE}.{CORE}"}
    wrong = []
    for module in found:
        if module.name == PACKAGE:
            continue
        here = room(module.name)
        if here not in RANK:
            wrong.append(f"{module.name}: {here} is no layer")
            continue
        for line, target in imported_modules(module, names):
            there = room(target)
            if there != CORE and RANK.get(there, len(RANK)) > RANK[here]:
                wrong.append(f"{module.path.relative_to(root)}:{line}: {here} imports {target}")
    return wrong


def cycles(root: Path) -> list[str]:
    """Groups of modules of which each imports, through others, every other one. Imports in functions count as well.

    An import from a package's submodule is one of the submodule only, as the package's `__init__` may import it back.
    """
    found = {module.name: module for module in modules(root)}
    graph = {
        name: sorted({target for _, target in imported_modules(module, set(found))} - {name, PACKAGE})
        for name, module in found.items()
        if name != PACKAGE
    }
    return [" <-> ".join(group) for group in components(graph) if len(group) > 1]


def components(graph: dict[str, list[str]]) -> list[list[str]]:
    """Tarjan's strongly connected components."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[-len(group) :]
            groups.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return groups


@pytest.mark.full
def test_no_import_runs_against_the_layers():
    wrong = against_the_layers(ROOT)
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
def test_no_modules_import_each_other():
    found = cycles(ROOT)
    assert not found, "\n".join(found)


def test_every_layer_is_a_room_of_the_package():
    assert {room(module.name) for module in modules()} - {"", CORE} == set(LAYERS)


def write(root: Path, files: dict[str, str]) -> Path:
    """A package of these files, with an empty `__init__.py` where none is given."""
    for name, code in {"__init__.py": "", **files}.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    return root


UPWARDS = [
    "from specengine.engine.engine import Engine",
    "from specengine.engine import engine",
    "import specengine.engine.engine as e",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from specengine.engine.engine import Engine",
    "def late():\n    from specengine.engine.engine import Engine",
    "from ..engine.engine import Engine",
    "from .. import engine",
    "from specengine import Engine",
    "import specengine",
]


@pytest.mark.parametrize("code", UPWARDS)
def test_an_import_against_the_layers_is_noticed(tmp_path, code):
    rooms = {"engine/__init__.py": "", "engine/engine.py": "class Engine: ...", "ops/__init__.py": ""}
    write(tmp_path, {**rooms, "ops/linear.py": code})
    (wrong,) = against_the_layers(tmp_path)
    assert wrong.startswith("specengine/ops/linear.py:") and "ops imports specengine" in wrong


def test_imports_downwards_and_of_the_core_are_free(tmp_path):
    below = "from specengine.ops.linear import x\nfrom specengine import _C\nfrom specengine._C import y\nimport os"
    rooms = {"ops/__init__.py": "", "ops/linear.py": "from . import other", "ops/other.py": "from specengine import _C"}
    write(tmp_path, {"__init__.py": "from specengine.cli import main", "cli/main.py": below, **rooms})
    assert against_the_layers(tmp_path) == []


def test_a_room_without_a_layer_is_noticed(tmp_path):
    assert against_the_layers(write(tmp_path, {"attic/box.py": ""})) == ["specengine.attic.box: attic is no layer"]


def test_a_cycle_of_imports_is_noticed(tmp_path):
    files = {"ops/a.py": "def late():\n    from specengine.ops import b", "ops/b.py": "import specengine.ops.c"}
    write(tmp_path, {**files, "ops/__init__.py": "", "ops/c.py": "from .a import x", "ops/d.py": "from .a import x"})
    assert cycles(tmp_path) == ["specengine.ops.a <-> specengine.ops.b <-> specengine.ops.c"]


def test_the_reader_finds_the_modules_of_this_package():
    assert {"specengine.types", "specengine.ops.linear", "specengine.engine"} <= {module.name for module in modules()}
    assert all(isinstance(module, Module) for module in modules())
