"""Writes specengine/_C/__init__.pyi from the built module, whose functions carry their signatures.

Run it after a change to an op's struct: python csrc/bindings/write_stub.py. tests/test_stub.py fails until then.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

HEAD = """\
# The native core. Written by csrc/bindings/write_stub.py from the built module: do not edit.
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
"""
CUDA_ONLY = ["def set_programmatic_launch(enabled: bool) -> None: ...  # only in builds with CUDA"]
WIDTH = 120

# pybind11 spells types differently from version to version.
SPELLINGS = [
    (r"typing\.Supports(Int|Float)( \| typing\.SupportsIndex)?", lambda m: m[1].lower()),
    (r"(collections\.abc|typing)\.", ""),
    (r"\w+\._C\.", ""),
    (r"\bList\b", "list"),
    (r"\bTuple\b", "tuple"),
]


def stub_of(module: ModuleType) -> str:
    """The text of the stub: records and classes before functions that take them, then functions and values."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    public.pop("set_programmatic_launch", None)
    classes = {name: value for name, value in public.items() if inspect.isclass(value)}
    functions = {name: value for name, value in public.items() if callable(value) and name not in classes}
    parts = [HEAD]
    for name, value in classes.items():
        parts.append(_record(name, value) if issubclass(value, tuple) else _class(name, value))
    parts.append("\n".join([*(_function(name, value) for name, value in functions.items()), *CUDA_ONLY]) + "\n")
    values = {name: value for name, value in public.items() if name not in classes and name not in functions}
    parts.append("\n".join(f"{name}: {_type_of(value)}" for name, value in values.items()) + "\n")
    return "\n".join(parts)


def _record(name: str, kind: type) -> str:
    fields = _arguments(_signature(kind.__doc__ or "")[0])
    return f"class {name}(NamedTuple):\n" + "".join(f"    {field}\n" for field in fields)


def _class(name: str, kind: type) -> str:
    lines = []
    for member, value in vars(kind).items():
        if isinstance(value, property):
            _, result = _signature((value.fget.__doc__ if value.fget else None) or "")
            lines += ["    @property", f"    def {member}(self) -> {result}: ..."]
        elif callable(value) and (not member.startswith("_") or member in ("__init__", "__len__")):
            lines.append(_function(member, value, indent="    "))
    return f"class {name}:\n" + "\n".join(lines) + "\n"


def _function(name: str, value: Any, indent: str = "") -> str:
    text, result = _signature(value.__doc__ or "")
    arguments = [
        "self" if argument.startswith(("self:", "arg0: " + "self")) else argument for argument in _arguments(text)
    ]
    line = f"{indent}def {name}({', '.join(arguments)}) -> {result}: ..."
    if len(line) <= WIDTH:
        return line
    shorter = f"{indent}    {', '.join(arguments)}"
    if len(shorter) <= WIDTH:
        return f"{indent}def {name}(\n{shorter}\n{indent}) -> {result}: ..."
    return f"{indent}def {name}(\n" + "".join(f"{indent}    {a},\n" for a in arguments) + f"{indent}) -> {result}: ..."


def _signature(doc: str) -> tuple[str, str]:
    """The arguments and the result of a signature as pybind11 writes it: `name(arguments) -> result`."""
    text = doc.splitlines()[0]
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
    arguments, _, result = text.partition("(")[2].rpartition(")")
    return arguments, result.removeprefix(" -> ") or "None"


def _arguments(text: str) -> list[str]:
    """The arguments one by one; a comma inside brackets separates none. Lists may be any sequences."""
    arguments, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            arguments.append("")
        else:
            arguments[-1] += character
    return [re.sub(r": list\[", ": Sequence[", argument.strip()) for argument in arguments if argument.strip()]


def _type_of(value: object) -> str:
    if isinstance(value, dict):
        key, first = next(iter(value.items()))
        return f"dict[{_type_of(key)}, {_type_of(first)}]"
    if isinstance(value, tuple):
        kinds = [_type_of(part) for part in value]
        if isinstance(value[0], (tuple, str)):
            return f"tuple[{kinds[0]}, ...]"
        return f"tuple[{', '.join(kinds)}]"
    return type(value).__name__


if __name__ == "__main__":
    from specengine import _C

    assert _C.__file__ is not None
    (Path(_C.__file__).parent / "__init__.pyi").write_text(stub_of(_C), encoding="utf-8")
