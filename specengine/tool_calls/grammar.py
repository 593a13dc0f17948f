"""The grammar of a whole answer: free reasoning, then enforced tool calls or an enforced answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specengine.constraints.choices import regex_of
from specengine.constraints.gbnf import as_lark
from specengine.tool_calls.answer_parser import AnswerFormat
from specengine.tool_calls.call_grammar import FunctionSchema
from specengine.tool_calls.dialects import Dialect
from specengine.tool_calls.lark_writer import LarkWriter, either, regex_literal

# The parser skips space before a bare call, so no free text may begin with space and a brace.
_NO_BRACE = r"\s*|\s*[^{\s](?s:.*)"
_SPACE = r"[ \n]{0,2}"  # models write one or two newlines behind their reasoning


@dataclass(frozen=True)
class Enforced:
    """What an answer must be.

    functions: the functions that it may call.  required: it must call one.  parallel: it may have several calls.
    content: what an answer without calls must be, as a parameter of SamplingParams; empty allows any text.
    """

    functions: tuple[FunctionSchema, ...] = ()
    required: bool = False
    parallel: bool = True
    content: Mapping[str, Any] = field(default_factory=dict)


def write_grammar(answer: AnswerFormat, enforced: Enforced, tokens: Mapping[str, int]) -> str:
    """Returns the Lark grammar of an answer.  tokens: ids of tags that are tokens, by their text.

    Raises ValueError for constrained content beside optional calls if the dialect's calls cannot be told from it.
    """
    writer = LarkWriter({tag: tokens[tag] for tag in answer.markers if tag in tokens})
    return writer.finish(f"{_write_reasoning(writer, answer)} {_write_body(writer, answer, enforced)}".strip())


def _write_reasoning(writer: LarkWriter, answer: AnswerFormat) -> str:
    """Returns an expression for the reasoning with its closing tag. Without an opened tag the model may skip it.

    A call in reasoning that the end of the text cuts would count for the parser, so it holds no opening tags.
    """
    tags = answer.reasoning
    if tags is None:
        return ""
    openers = answer.dialect.openers if answer.dialect else ()
    rest = f"{writer.text_until(tags.close, openers)} {writer.pattern(_SPACE)}"
    return rest if answer.opened else f"({writer.tag(tags.open)} {rest})?"


def _write_body(writer: LarkWriter, answer: AnswerFormat, enforced: Enforced) -> str:
    dialect = answer.dialect
    if dialect is None or not enforced.functions:
        return _write_content(writer, **enforced.content)
    calls = dialect.write_calls(writer, enforced.functions)
    only_calls = _write_calls(writer, dialect, enforced)
    if enforced.required:
        return only_calls
    if enforced.content:
        if dialect.bare:
            raise ValueError("this model's calls are JSON too; tool_choice must be none or required")
        return either([only_calls, _write_content(writer, **enforced.content)])
    if dialect.bare:
        # Behind reasoning the parser would find bare calls again.
        begins = [answer.reasoning.open] if answer.reasoning else []
        return either([only_calls, writer.pattern(_NO_BRACE, [*dialect.openers, *begins])])
    behind_tag = calls.several if calls.several and enforced.parallel else calls.one
    opening, *others = dialect.openers
    one = f"{writer.text_until(opening, others)} {behind_tag}"
    return f"({one}){'*' if enforced.parallel else '?'} {writer.text_without(dialect.openers)}"


def _write_content(
    writer: LarkWriter,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    grammar: str | None = None,
    choices: Sequence[str] = (),
) -> str:
    """Returns an expression for the content: one of the constraints."""
    if json_schema is not None:
        return writer.json(json_schema)
    if grammar is not None:
        return writer.nested(as_lark(grammar))
    return writer.pattern(regex_literal(regex if regex is not None else regex_of(choices)))


def _write_calls(writer: LarkWriter, dialect: Dialect, enforced: Enforced) -> str:
    """Returns an expression for calls without other text."""
    calls = dialect.write_calls(writer, enforced.functions)
    opening = "" if dialect.bare else writer.tag(dialect.openers[0])
    if not enforced.parallel:
        return f"{opening} {calls.one}"
    if calls.several:
        return f"{opening} {calls.several}"
    one = writer.rule(f"{opening} {calls.one}")
    return f"{one} ({calls.separator} {one})*"
