"""The stub of the native module says what the module has."""

import ast
import inspect
import re
from pathlib import Path

from specengine import _C

FOLDER = Path(_C.__file__).parent
CUDA_ONLY = {"set_programmatic_launch"}


def public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__len__")


def built(owner) -> dict[str, object]:
    """Each public name: a function with its arguments, a class with its members, None for a value."""
    names: dict[str, object] = {}
    for name, value in vars(owner).items():
        if not public(name):
            continue
        if inspect.isclass(value):
            names[name] = built(value)
        elif callable(value):
            names[name] = re.findall(r"(\w+): ", value.__doc__.splitlines()[0])
        else:
            names[name] = None
    return names


def stubbed(body: list[ast.stmt]) -> dict[str, object]:
    """As built, of the stub."""
    names: dict[str, object] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = stubbed(node.body)
        elif isinstance(node, ast.FunctionDef):
            nameless = [f"arg{i}" for i in range(len(node.args.posonlyargs))]
            value = bool(node.decorator_list)  # a property
            names[node.name] = None if value else nameless + [argument.arg for argument in node.args.args]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = None
    return names


def test_stub_and_native_module_have_the_same_names_and_arguments():
    module, stub = built(_C), stubbed(ast.parse((FOLDER / "__init__.pyi").read_text()).body)
    assert {name: stub[name] for name in stub if name in module or name not in CUDA_ONLY} == module
    assert module["compact_kv"][-1] == "path_length"
    assert module["PhrasePool"]["newest"] == ["self", "token", "most"]


def test_package_says_that_it_is_typed():
    assert (FOLDER.parent / "py.typed").is_file()
