"""Helpers that several test modules use lie in modules of their own: no module imports from a test module."""

import ast
from pathlib import Path

import pytest

from tests.structure.source import ROOT


def imports_from_tests(root: Path) -> list[str]:
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            if any(part.startswith("test_") for name in names for part in name.split(".")):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {', '.join(names)}")
    return found


@pytest.mark.full
def test_no_module_imports_from_a_test_module():
    found = imports_from_tests(ROOT)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "from tests.ops.test_linear import check",
        "from tests.ops import cases, test_linear",
        "import tests.ops.test_linear as linear",
        "def late():\n    from tests.ops.test_linear import check",
    ],
)
def test_an_import_from_a_test_module_is_noticed(tmp_path, code):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_layer.py").write_text("import pytest\nfrom tests.ops.cases import comb\n" + code)
    (found,) = imports_from_tests(tmp_path)
    assert "test_linear" in found
