"""What the structure tests read: the package's modules, their imports and their accesses to private members."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "specengine"


@dataclass(frozen=True)
class Module:
    path: Path
    name: str  # dotted, of a package without `.__init__`

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of everything the module imports; for `from a import b` it is a.b."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, node.module] if node.module else parts)


def modules(root: Path = ROOT) -> list[Module]:
    """All modules of the package below `root`, sorted by name."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found.append(Module(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return sorted(found, key=lambda module: module.name)


def imported_modules(module: Module, names: set[str]) -> list[tuple[int, str]]:
    """(line, module of the package) of every import of one of `names`."""
    found = []
    for line, target in module.imports():
        while target and target not in names:
            target = target.rpartition(".")[0]
        if target:
            found.append((line, target))
    return found
