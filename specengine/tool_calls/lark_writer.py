"""Writes the rules of a Lark grammar in the dialect of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_ANY = r"(?s:.*)"


class LarkWriter:
    """Collects the rules of one grammar.

    tokens: ids of the tokens that stand for whole tags, by their text. Text cannot be spelled with such tokens.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: list[str] = []
        self._forces = True
        self._names: dict[str, str] = {}  # rule by its body

    def tag(self, text: str) -> str:
        """Returns an expression for a tag: its token if there is one, else its text."""
        return f"<[{self._tokens[text]}]>" if text in self._tokens else quote(text)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Returns a rule for JSON of a schema."""
        return self._rule("json", f"%json {json.dumps(schema)}")

    def nested(self, grammar: str) -> str:
        """Returns a rule for the texts of another Lark grammar, whose forced texts may have no end."""
        self._forces = False
        return self._rule("part", f"%lark {{\n{grammar}\n}}")

    def text_without(self, tags: Iterable[str]) -> str:
        """Returns a terminal for any text that holds none of the tags, spelled with any tokens."""
        return self._terminal(_but(_ANY, tags))

    def text_until(self, tag: str, without: Iterable[str] = ()) -> str:
        """Returns a rule for any text that ends with the first such tag, and holds none of the others."""
        if tag in self._tokens:
            return self._rule("until", f"{self.text_without([tag, *without])} {self.tag(tag)}")
        # A lazy rule ends at the first tag.
        return self._rule("until", f"{self._terminal(_but(_ANY, without))} {quote(tag)}", "[lazy]")

    def pattern(self, regex: str, without: Iterable[str] = ()) -> str:
        """Returns a terminal for the texts of a regular expression that hold none of the tags."""
        return self._terminal(_but(regex, without))

    def other_than(self, regex: str, texts: Iterable[str]) -> str:
        """Returns a terminal for the texts of a regular expression that are none of these."""
        others = "|".join(map(_escape, texts))
        return self._terminal(f"/{regex}/ & ~/({others})/" if others else f"/{regex}/")

    def rule(self, body: str) -> str:
        """Returns a rule."""
        return self._rule("part", body)

    def finish(self, start: str) -> str:
        """Returns the grammar whose texts are those of `start`. What they force ends, so it may be looked for."""
        forcing = f'%llguidance {{"no_forcing": {json.dumps(not self._forces)}}}'
        return "\n".join([f"start: {start}", *self._rules, forcing]) + "\n"

    def _terminal(self, body: str) -> str:
        return self._rule("TEXT", body)

    def _rule(self, kind: str, body: str, options: str = "") -> str:
        if body not in self._names:
            self._names[body] = f"{kind}_{len(self._names)}"
            self._rules.append(f"{self._names[body]}{options}: {body}")
        return self._names[body]


def quote(text: str) -> str:
    """Returns a text as Lark spells it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # DEL, which Lark takes escaped only


def regex_literal(regex: str) -> str:
    """Returns an expression of any characters as it stands between the slashes of Lark."""
    plain = {"/": r"\/", "\n": r"\n"}
    return re.sub(r"(\\.)|/|\n", lambda found: found[1] or plain[found[0]], regex, flags=re.DOTALL)


def either(expressions: Iterable[str]) -> str:
    """Returns the union of expressions."""
    return f"({' | '.join(expressions)})"


def _but(regex: str, tags: Iterable[str]) -> str:
    found = "|".join(map(_escape, dict.fromkeys(tags)))  # one complement, as llguidance's lexer bounds their number
    return f"/{regex}/ & ~/{_ANY}({found}){_ANY}/" if found else f"/{regex}/"


def _escape(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n").replace("\\\n", r"\n")
