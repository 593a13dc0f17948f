"""No class calls another's private method, or reads its private data."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure.source import PACKAGE, ROOT, Module, modules

OWN = {"self", "cls"}
CORE = "_C"
PUBLIC_DESPITE_THEIR_NAME = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples
Scope = frozenset[str]  # private names that the surrounding class defines


def foreign_accesses(module: Module, names: set[str]) -> Iterator[tuple[int, str, bool]]:
    """(line, code, whether it is called) of every access to a private member of something else.

    A class may use the private members that it defines on any of its instances, and a module those of its classes.
    """
    free = _module_aliases(module, names) | {n.name for n in ast.walk(module.tree) if isinstance(n, ast.ClassDef)}
    called = {id(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}

    def visit(node: ast.AST, own: Scope) -> Iterator[tuple[int, str, bool]]:
        if isinstance(node, ast.ClassDef):
            own = own | _private_members(node)
        private = isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own
        if private and not _is_free(node.value, free):
            yield node.lineno, ast.unparse(node), id(node) in called
        for child in ast.iter_child_nodes(node):
            yield from visit(child, own)

    yield from visit(module.tree, frozenset())


def _is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not dunder and name != CORE and name not in PUBLIC_DESPITE_THEIR_NAME


def _is_free(owner: ast.expr, free: set[str]) -> bool:
    if isinstance(owner, ast.Call):
        return isinstance(owner.func, ast.Name) and owner.func.id == "super"
    if isinstance(owner, ast.Attribute):
        return owner.attr == CORE
    return isinstance(owner, ast.Name) and (owner.id in OWN or owner.id == CORE or owner.id in free)


def _private_members(node: ast.ClassDef) -> Scope:
    """Methods, class variables, and what its methods assign to `self`."""
    found = {child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.add(child.id)
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and ast.unparse(child.value) in OWN:
            found.add(child.attr)
    return frozenset(filter(_is_private, found))


def _module_aliases(module: Module, names: set[str]) -> set[str]:
    """Names under which the file imports modules."""
    aliases = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name for a in node.names if f"{node.module}.{a.name}" in names}
    return aliases


def violations(root: Path) -> list[str]:
    found = modules(root)
    names = {module.name for module in found}
    return [
        f"{module.path.relative_to(root)}:{line}: {code}{'()' if called else ''}"
        for module in found
        for line, code, called in foreign_accesses(module, names)
    ]


@pytest.mark.full
def test_no_class_uses_the_private_members_of_another():
    found = violations(ROOT)
    assert not found, "\n".join(found)


def violations_in(root: Path, code: str) -> list[str]:
    (root / PACKAGE).mkdir()
    (root / PACKAGE / "__init__.py").write_text("", encoding="utf-8")
    (root / PACKAGE / "room.py").write_text(code, encoding="utf-8")
    return violations(root)


FOREIGN = [
    "def f(engine):\n    engine._cancel(3)",
    "class A:\n    def f(self):\n        self.engine._cancel()",
    "class A:\n    def f(self):\n        self._engine._cancel()",
    "class A:\n    def f(self):\n        return [queue._items for queue in self.queues]",
    "class A:\n    def f(self, other):\n        other._count += 1",
    "class A:\n    def _f(self): ...\ndef g(a):\n    a._f()",
    "from specengine.other import Engine\nEngine._start()",
    "make()._start()",
]


@pytest.mark.parametrize("code", FOREIGN)
def test_a_use_of_a_foreign_private_member_is_noticed(tmp_path, code):
    (found,) = violations_in(tmp_path, code)
    assert found.startswith("specengine/room.py:") and "._" in found


OWN_MEMBERS = [
    "class A:\n    def f(self):\n        self._g()\n        super()._g()\n        self.point._replace(x=1)",
    "class A:\n    def _g(self): ...\n    def f(self, other):\n        other._g()",
    "class A:\n    def __init__(self):\n        self._x = 1\n    def __eq__(self, o):\n        return self._x == o._x",
    "class A:\n    @classmethod\n    def f(cls):\n        return cls._make()",
    "class A:\n    @staticmethod\n    def _make(): ...\nA._make()",
    "import torch\ntorch._assert(True)",
    "from specengine import _C\n_C._free()\nops._C._free()",
    "class A:\n    def f(self, other):\n        return other.__class__.__name__",
]


@pytest.mark.parametrize("code", OWN_MEMBERS)
def test_the_use_of_an_own_private_member_is_free(tmp_path, code):
    assert violations_in(tmp_path, code) == []
