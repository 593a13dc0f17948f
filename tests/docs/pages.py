"""Reads the pages in docs/ and the README: fenced blocks, tables, links and words in code."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))

_FENCE = re.compile(r"^(?:<!-- (?P<mark>[^\n]*?) -->\n\n?)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
_COMMANDS = (["specengine"], ["python", "-m", "specengine.bench"])


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its first line of code.  reason: why it is not run, None where it is."""

    language: str
    code: str
    line: int
    reason: str | None


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text without its fenced blocks."""
        return _FENCE.sub("", self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        for match in _FENCE.finditer(self.text):
            mark = match["mark"] or ""
            reason = mark.removeprefix("not run: ") if mark.startswith("not run: ") else None
            line = self.text.count("\n", 0, match.start("code")) + 1
            found.append(Block(match["language"], match["code"], line, reason))
        return found

    @property
    def spans(self) -> list[str]:
        """What stands in backticks outside of fenced blocks."""
        return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", self.prose)]

    @property
    def new_files(self) -> list[str]:
        """Files that the page tells to write: they head a block."""
        return re.findall(r"^`([\w/.]+)`:", self.text, re.M)

    @property
    def links(self) -> list[str]:
        """Targets of links and pictures that are no web addresses."""
        targets = re.findall(r"\]\(([^)\s]+)\)", self.prose)
        return [target for target in targets if not re.match(r"[a-z]+:", target)]

    @property
    def anchors(self) -> set[str]:
        """What a heading is called in a link, as GitHub makes it."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def rows(self, heading: str) -> list[list[str]]:
        """The cells of the first table behind a heading, without its head."""
        _, _, rest = self.text.partition(f"\n{heading}\n")
        table = re.search(r"(?:^\|.*\n)+", rest.split("\n#")[0], re.M)
        lines = table[0].splitlines()[2:] if table else []
        return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def commands(code: str) -> list[list[str]]:
    """The commands of a shell block as words; a line that ends in a backslash goes on in the next.

    Unquoted, what separates commands is a word of its own: no drafter's option may be lost to the shell."""
    lines = code.replace("\\\n", " ").splitlines()
    return [_words(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def is_ours(words: list[str]) -> bool:
    """Whether it is a command of this package."""
    return any(words[: len(head)] == head for head in _COMMANDS)


def arguments(words: list[str]) -> tuple[str, list[str]]:
    """`specengine` or `specengine.bench`, and the arguments."""
    return ("specengine", words[1:]) if words[0] == "specengine" else (words[2], words[3:])
