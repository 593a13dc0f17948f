"""Generates prompts for drafters' training data: python recipes/prompts.py 6000 prompts.jsonl [SEED]

Prompts are made of the templates, texts and words of prompts.toml and of functions of Python's library. No two are
equal, and some have a second turn. The same seed and Python version (3.11 or later) give the same file.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType

import tomllib

LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WORDS = {name: [" ".join(word.split()) for word in text.split(",")] for name, text in LISTS["words"].items()}
SHARES = {"about": 9, "advice": 6, "chat": 3, "letters": 5, "writing": 8, "stories": 5, "roles": 4, "compare": 4}
SHARES |= {"history": 4, "travel": 3, "cooking": 3, "lists": 5, "rewriting": 5, "extraction": 5, "languages": 2}
SHARES |= {"sums": 5, "logic": 2}
CODE_SHARES = {"coding": 12, "commands": 5, "snippets": 2, "library": 7, "exercise": 3, "source": 3}
LONGEST = 900  # characters of a function's source


def main(count: int, path: Path, seed: int = 0) -> None:
    """Writes `count` prompts."""
    draw = random.Random(seed)
    shares = SHARES | CODE_SHARES
    functions = list(library(WORDS["modules"]))
    short = [function for function in functions if len(function["source"]) < LONGEST]
    prompts: dict[str, list[str]] = {}
    while len(prompts) < count:
        (kind,) = draw.choices(list(shares), list(shares.values()))
        fields = Fields(draw, draw.choice(short if kind == "source" else functions))
        turns = [draw.choice(LISTS["prompts"][kind]).format_map(fields)]
        if kind not in CODE_SHARES:
            turns[0] = re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", turns[0])
            if draw.random() < 0.9:  # some users write no capital letter
                turns[0] = turns[0][0].upper() + turns[0][1:]
        if draw.random() < 0.3:
            turns.append(draw.choice(LISTS["second"]["code" if kind in CODE_SHARES else "plain"]).format_map(fields))
        prompts[turns[0]] = turns
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in prompts.values()), encoding="utf-8")


class Fields(dict):
    """Draws the fields of a template on first use; {word} and {word2} are different words."""

    def __init__(self, draw: random.Random, function: dict[str, str]) -> None:
        numbers = {"n": draw.randint(2, 12), "a": draw.randint(13, 99), "b": draw.randint(5, 95)}
        super().__init__(function | numbers | {"c": draw.randint(100, 999), "year": draw.randint(1500, 2020)})
        self._draw = draw

    def __missing__(self, field: str) -> str:
        name = field.rstrip("0123456789")
        if texts := LISTS["texts"].get(name):
            self[field] = self._draw.choice(texts).format_map(self)
        else:
            words = WORDS.get(name) or LISTS["codes"][name]
            self[field] = self._draw.choice([word for word in words if word not in self.values()])
        return self[field]


def library(modules: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yields name, summary, signature with docstring, and source of documented functions; skips missing modules."""
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError:  # the module belongs to another Python version or platform
            continue
        for owner in (module, *(c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == name)):
            for own, function in inspect.getmembers(owner, inspect.isfunction):
                doc = inspect.getdoc(function) or ""
                if function.__module__ == name and not own.startswith("_") and 30 <= len(doc) <= 600:
                    yield from described(own, function, doc)


def described(name: str, function: FunctionType, doc: str) -> Iterator[dict[str, str]]:
    """Yields one function; skips functions made at run time and defaults that are no Python source."""
    try:
        source, signature = inspect.getsource(function), str(inspect.signature(function))
    except OSError:
        return
    if "<" in signature:
        return
    lines = doc.replace('"""', "'''").splitlines()
    quoted = "\n".join(f"    {line}".rstrip() for line in ['"""' + lines[0], *lines[1:], '"""'])
    stub = f"def {name}{signature}:\n{quoted}\n"
    yield {"function": name, "summary": lines[0], "stub": stub, "source": source}


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
