"""Prompts for drafters' training data: python recipes/prompts.py 6000 prompts.jsonl [SEED]

Requests that a small assistant gets, from the word lists of prompts.toml and from functions of Python's own library; a
third of them with a second turn. The same seed and Python version (3.11 or later) give the same file.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType

import tomllib

LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS = {"about": 0.20, "chat": 0.15, "stories": 0.10, "sums": 0.10, "work": 0.10}
CODE_KINDS = {"coding": 0.12, "library": 0.12, "exercise": 0.08, "source": 0.03}
LONGEST = 900  # characters of a function's source


def main(count: int, path: Path, seed: int = 0) -> None:
    """Writes so many prompts."""
    draw = random.Random(seed)
    shares = KINDS | CODE_KINDS
    functions = list(library(LISTS["modules"]))
    short = [function for function in functions if len(function["source"]) < LONGEST]
    with path.open("w", encoding="utf-8") as file:
        for kind in draw.choices(list(shares), list(shares.values()), k=count):
            fields = draw.choice(short if kind == "source" else functions) | words(draw)
            text = draw.choice(LISTS[kind]).format(**fields)
            turns = [text[0].upper() + text[1:] if kind in ("sums", "work") else text]
            if draw.random() < 1 / 3:
                turns.append(draw.choice(LISTS["code_again" if kind in CODE_KINDS else "again"]))
            file.write(json.dumps({"turns": turns}) + "\n")


def words(draw: random.Random) -> dict[str, str | int]:
    """What stands for the letters in templates."""
    (t, u), (p, q) = draw.sample(LISTS["topics"], 2), draw.sample(LISTS["people"], 2)
    numbers = {"n": draw.randint(2, 12), "a": draw.randint(13, 99), "b": draw.randint(5, 95)}
    code = {"k": draw.choice(LISTS["tasks"]), "l": draw.choice(LISTS["languages"])}
    return {"t": t, "u": u, "p": p, "q": q, "exercise": draw.choice(LISTS["stubs"])} | code | numbers


def library(modules: Sequence[str]) -> Iterator[dict[str, str]]:
    """Name, first sentence, signature with docstring, and source of documented functions; a module may be missing."""
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError:  # of another Python version or platform
            continue
        for owner in (module, *(c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == name)):
            for own, function in inspect.getmembers(owner, inspect.isfunction):
                doc = inspect.getdoc(function) or ""
                if function.__module__ == name and not own.startswith("_") and 30 <= len(doc) <= 600:
                    yield from described(own, function, doc)


def described(name: str, function: FunctionType, doc: str) -> Iterator[dict[str, str]]:
    """One function; nothing if it was made at run time."""
    try:
        source = inspect.getsource(function)
    except OSError:
        return
    lines = doc.replace('"""', "'''").splitlines()
    quoted = "\n".join(f"    {line}".rstrip() for line in ['"""' + lines[0], *lines[1:], '"""'])
    stub = f"def {name}{inspect.signature(function)}:\n{quoted}\n"
    yield {"name": name, "sentence": lines[0], "stub": stub, "source": source}


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
