"""Reads what a caller's Lark grammar names outside of its literals, and refuses what a text could not keep."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from specengine.constraints.chains import LONGEST, longest_chain

# Each reads a place of the text a few times at most, whatever it holds. Outside of a literal no backslash can stand, so
# what follows one begins none: else one without an end would be read from each of its escaped quotes again.
_LITERAL = re.compile(r'(?<!\\)"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|(?<!\\)/(?:\\.|[^/\\\n])+/')
_TOKEN = re.compile(r"<(?:\[(?P<ids>[^\[\]<\s]*)\]|(?P<text>[^<>\s\[]+))>")
_ATTRIBUTES = re.compile(r"\w\s*\[([^\[\]]*)\]")
_REFUSED = re.compile(r"\b(temperature|max_tokens)\s*=")
_NAME = re.compile(r"\b([^\W\d]\w*)\b((?:::\w+)?\s*(?:(?:\[[^\[\]]*\]|\{[^{}]*\})\s*)*:)?")
_FORCING = '"no_forcing"'


def without_literals(grammar: str) -> str:
    """Returns a grammar with spaces in place of its strings, regexes and comments; every place stays the same."""
    return _LITERAL.sub(lambda found: " " * len(found[0]), grammar)


def check_names(grammar: str, ends: Mapping[int, str]) -> None:
    """Refuses tokens that end a text, which would end it in the middle, and attributes that mean nothing here.

    ends: the texts of the end-of-text tokens, by id.
    Raises ValueError naming the token or the attribute.
    """
    code = without_literals(grammar)
    for attributes in _ATTRIBUTES.finditer(code):
        if found := _REFUSED.search(attributes[1]):
            raise ValueError(f"grammar: {found[1]}: a rule cannot have this attribute; SamplingParams holds for all")
    for named in _TOKEN.finditer(code):
        if ended := [ends[token] for token in sorted(ends) if _holds(named, token, ends[token])]:
            raise ValueError(f"grammar: {named[0]}: {ended[0]} ends a text, so no grammar may name it")


def check_depth(grammar: str) -> None:
    """Raises ValueError where rules refer to others through more levels than the grammar engine has stack for."""
    rules: dict[str, list[str]] = {"": []}
    rule = ""
    for name, defines in _NAME.findall(without_literals(grammar)):
        if defines:
            rule = name
            rules.setdefault(rule, [])
        else:
            rules[rule].append(name)
    if longest_chain(rules) > LONGEST:
        raise ValueError(f"grammar: its rules refer to each other more than {LONGEST} levels deep")


def bound_forcing(grammar: str) -> str:
    """Leaves a grammar's forced texts unsearched unless it decides that itself: the search may never end."""
    return grammar if _FORCING in grammar else f"{grammar}\n%llguidance {{{_FORCING}: true}}"


def _holds(named: re.Match[str], token: int, text: str) -> bool:
    if named["ids"] is None:
        return named[0] == text
    ids = named["ids"]
    return ids == "*" or _listed(ids.removeprefix("^").split(","), token) != ids.startswith("^")


def _listed(ranges: Collection[str], token: int) -> bool:
    for each in ranges:
        first, _, last = each.partition("-")
        if first.isdecimal() and int(first) <= token <= int(last if last.isdecimal() else first):
            return True
    return False
