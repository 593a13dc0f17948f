"""The parts of an answer, in the order in which a parser finds them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class Content:
    """A piece of the visible answer.  at: its offset in the raw text."""

    text: str
    at: int


@dataclass(frozen=True)
class Reasoning:
    """A piece of the reasoning.  at: its offset in the raw text."""

    text: str
    at: int


@dataclass(frozen=True)
class ToolStart:
    """A call begins. Pieces of its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the JSON text of the last call's arguments."""

    text: str


Event = Content | Reasoning | ToolStart | Arguments
T = TypeVar("T")
# A parser yields events, and None where it cannot decide without more text.
Parsing = Generator[Event | None, None, T]
MakeEvent = Callable[[str, int], Event | None]
