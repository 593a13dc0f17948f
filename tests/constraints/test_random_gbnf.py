"""Random grammars in GBNF, recursive ones among them, have exactly their language: a plain parser is the reference."""

from __future__ import annotations

import random
from itertools import product

import pytest

from specengine import SamplingParams
from tests.constraints.vocabulary import grammars

TEXTS = ["".join(text) for length in range(6) for text in product("ab", repeat=length)]
RULES = ("root", "b", "c-d")
REPEATS = {"": (1, 1), "?": (0, 1), "*": (0, 9), "+": (1, 9), "{2}": (2, 2), "{1,2}": (1, 2), "{2,}": (2, 9)}
CLASSES = {"[a]": "a", "[^a]": "b", "[a-b]": "ab", ".": "ab", r"[\x61]": "a", r"[^\u0061b]": ""}

# A node is ("text", characters), ("class", its name), ("rule", name), ("seq" or "or", nodes), or (a repeat, node).


def random_node(rng: random.Random, rules: tuple[str, ...], depth: int):
    kind = rng.choice(("text", "text", "class", "rule", *(("seq", "or", "repeat") * 2 if depth else ())))
    if kind == "text":
        return kind, "".join(rng.choices("ab", k=rng.randint(1 if depth else 0, 3)))
    if kind == "class":
        return kind, rng.choice([*CLASSES])
    if kind == "rule":
        return kind, rng.choice(rules)
    if kind == "repeat":
        return rng.choice([*REPEATS]), random_node(rng, rules, depth - 1)
    return kind, [random_node(rng, rules, depth - 1) for _ in range(rng.randint(1, 3))]


def written(node) -> str:
    kind, inner = node
    if kind == "text":
        return f'"{inner}"'
    if kind in ("class", "rule"):
        return inner
    if kind in ("seq", "or"):
        return f"({(' ' if kind == 'seq' else ' | ').join(map(written, inner))})"
    return f"({written(inner)}){kind}"


def ends(node, text: str, start: int, known: dict) -> set[int]:
    """Where texts of a node that begin at `start` may end.  known: the ends of rules, as far as they are found."""
    kind, inner = node
    if kind == "text":
        return {start + len(inner)} if text.startswith(inner, start) else set()
    if kind == "class":
        return {start + 1} if text[start : start + 1] and text[start] in CLASSES[inner] else set()
    if kind == "rule":
        return known[inner, start]
    if kind == "or":
        return set().union(*(ends(each, text, start, known) for each in inner))
    if kind == "seq":
        reached = {start}
        for each in inner:
            reached = set().union(*(ends(each, text, place, known) for place in reached))
        return reached
    least, most = REPEATS[kind]
    reached, found = {start}, {start} if least == 0 else set()
    for count in range(1, most + 1):
        reached = set().union(*(ends(inner, text, place, known) for place in reached))
        found |= reached if count >= least else set()
    return found


def is_text(rules: dict, text: str) -> bool:
    known = {(name, start): set() for name in rules for start in range(len(text) + 1)}
    while True:
        new = {(name, start): ends(rules[name], text, start, known) for name, start in known}
        if new == known:
            return len(text) in known["root", 0]
        known = new


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.full)], ids=str)
def test_a_random_grammar_accepts_what_a_parser_accepts(seeds):
    made, accepted, refused = grammars(), 0, 0
    for seed in seeds:
        rng = random.Random(seed)
        names = RULES[: rng.randint(1, 3)]
        used = names if rng.random() < 0.6 else names[1:] or ("root",)
        rules = {name: random_node(rng, used if name == "root" else names, 2) for name in names}
        grammar = "\n".join(f"{name} ::= {written(node)}" for name, node in rules.items())
        expected = {text for text in TEXTS if is_text(rules, text)}
        try:
            constraint = made.constraint(SamplingParams(grammar=grammar))
        except ValueError as error:
            assert "no text fulfils it" in str(error) and not expected, (seed, grammar)
            refused += 1
            continue
        found = set()
        for text in TEXTS:
            matcher = constraint._start.deep_copy()
            if matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting():
                found.add(text)
        assert found == expected, (seed, grammar)
        accepted += len(found)
    assert accepted > len(seeds) > 2 * refused
