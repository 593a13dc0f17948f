"""What a dialect's grammar consists of, and the JSON form of a call that three dialects share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specengine.tool_calls.lark_writer import LarkWriter, either, quote


@dataclass(frozen=True)
class FunctionSchema:
    """A function and the JSON schema of its arguments, an object."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class CallGrammar:
    """Expressions for the text behind an opening tag.

    one: a single call.  several: one or more calls behind one tag; None if each call has its own tag.
    separator: stands between a call and the next opening tag.
    """

    one: str
    several: str | None = None
    separator: str = '""'


def json_calls(writer: LarkWriter, functions: Sequence[FunctionSchema], key: str) -> str:
    """Returns an expression for one call as a JSON object.  key: of the arguments.

    The arguments have a grammar of their own, because references in their schema begin at its root.
    """
    heads = (f'{{"name": "{function.name}", "{key}": ' for function in functions)
    return either(
        f'{quote(head)} {writer.json(function.schema)} "}}"' for head, function in zip(heads, functions, strict=True)
    )
