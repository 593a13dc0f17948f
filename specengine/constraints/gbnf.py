"""Reads GBNF, the grammars of llama.cpp, as Lark.

llguidance's own translation makes lexemes of rules. They take all text that they can, so they refuse texts that the
grammar allows. Here a grammar without recursion becomes one lexeme, and one with recursion has a lexeme for each
character. Both have exactly the grammar's language.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain, islice, pairwise

_WORD = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*") | (?P<class>\[(?:\\.|[^]\\])*]) | (?P<skip>\#[^\n]* | \s+)
    | (?P<name>[A-Za-z0-9_-]+) | (?P<any>\.) | ::= | (?P<sign>\{[^}]*} | [|()*+?]) | .""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([nrt])|\\([^a-zA-Z0-9])|([^\\])", re.DOTALL
)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_SPELLED = r"(?:\\x..|.)"  # a character as _characters() yields it

Word = tuple[str | None, str]  # kind and text
_END: Word = (None, "")


@lru_cache(maxsize=64)
def as_lark(grammar: str) -> str:
    """Returns a Lark grammar as it is, and the translation of a GBNF grammar, which begins with `name ::=`.

    Raises ValueError naming the parameter `grammar`.
    """
    first, second = islice(chain(_words(grammar), [_END] * 2), 2)
    if first[0] != "name" or second[1] != "::=":
        return grammar
    rules = _used(_split(_words(grammar)))
    is_lexeme = not _recurs(rules)
    names = {name: f"{'R' if is_lexeme else 'r'}{number}" for number, name in enumerate(rules)}
    lines = [f"{names[name]}: {''.join(_write(body, names, is_lexeme))}" for name, body in rules.items()]
    forcing = ['%llguidance {"no_forcing": false}'] if is_lexeme else []  # what one lexeme forces has an end
    return "\n".join([f"start: {names['root']}", *lines, *forcing]) + "\n"


def _words(grammar: str) -> Iterator[Word]:
    """Yields the words of a grammar; a reader that stops at a wrong one takes time in proportion to the text."""
    return ((found.lastgroup, found[0]) for found in _WORD.finditer(grammar) if found.lastgroup != "skip")


def _split(words: Iterable[Word]) -> dict[str, list[Word]]:
    """Returns the words of each rule."""
    rules: dict[str, list[Word]] = {}
    body: list[Word] = []
    for word, (_, sign) in pairwise(chain(words, [_END])):
        if sign == "::=":
            if word[0] != "name" or word[1] in rules:
                raise ValueError(f"grammar: {word[1][:100]!r} is defined twice, or is no name of a rule")
            body = rules[word[1]] = []
        elif word[0] is not None:
            body.append(word)
        elif word[1] != "::=":
            raise ValueError(f"grammar: GBNF cannot have {word[1]!r} here")
    return rules


def _used(rules: dict[str, list[Word]]) -> dict[str, list[Word]]:
    """Returns the rules that root needs, root first."""
    found = {"root": None}
    for name in (queue := ["root"]):
        if name not in rules:
            raise ValueError(f"grammar: there is no rule {name[:100]!r}")
        new = _references(rules[name]) - found.keys()
        found |= dict.fromkeys(new)
        queue += new
    return {name: rules[name] for name in found}


def _recurs(rules: dict[str, list[Word]]) -> bool:
    try:
        TopologicalSorter({name: _references(body) for name, body in rules.items()}).prepare()
    except CycleError:
        return True
    return False


def _references(body: list[Word]) -> set[str]:
    return {text for kind, text in body if kind == "name"}


def _write(body: list[Word], names: dict[str, str], is_lexeme: bool) -> Iterator[str]:
    """Yields the words of a rule's body as Lark has them."""
    for (_, before), (kind, text) in pairwise([("sign", "|"), *body, _END]):
        if before in ("(", "|") and text in ("|", ")", ""):
            yield ' ""'
        if kind == "name":
            yield f" {names[text]}"
        elif kind == "string":
            yield _string([*_characters(text[1:-1])], is_lexeme)
        elif kind == "class":
            yield _class(text[1:-1])
        elif kind == "any":
            yield " /(?s:.)/"
        elif kind == "sign":
            yield text


def _string(characters: list[str], is_lexeme: bool) -> str:
    if is_lexeme or len(characters) < 2:
        return f' "{"".join(characters)}"'
    return f" ({' '.join(f'{chr(34)}{each}{chr(34)}' for each in characters)})"


def _class(text: str) -> str:
    """Returns a class of characters; a dash between two of them is a range."""
    negated = text.startswith("^")
    spelled = "".join(_characters(text[negated:]))
    parts = re.sub(
        rf"({_SPELLED})(?:-({_SPELLED}))?",
        lambda found: "-".join(each.replace("-", r"\x2d") for each in found.groups() if each),
        spelled,
    )
    return f" /[{'^' * negated}{parts}]/"


def _characters(text: str) -> Iterator[str]:
    r"""Yields the characters of a literal: letters, digits and dashes as they are, other ASCII as \xHH."""
    end = 0
    for found in _CHARACTER.finditer(text):
        if found.start() != end:
            break
        end = found.end()
        *codes, control, escaped, plain = found.groups()
        code = next((code for code in codes if code), None)
        character = _character(code) if code else _CONTROL.get(control or "") or escaped or plain
        is_plain = plain == "-" or character.isalnum() or not character.isascii()
        yield character if is_plain else f"\\x{ord(character):02x}"
    if end < len(text):
        raise ValueError(f"grammar: {text[end : end + 2]!r} is no escape of GBNF")


def _character(code: str) -> str:
    number = int(code, 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise ValueError(f"grammar: U+{code} is no character")
    return chr(number)
