"""Turns tools and the constraint of a text into that of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from specengine.constraints.multiples import check_multiples
from specengine.server.chat.schema import ChatRequest
from specengine.server.chat.tools import Function
from specengine.server.constraint_fields import TextConstraint
from specengine.server.errors import ApiError
from specengine.tool_calls.answer_parser import AnswerFormat
from specengine.tool_calls.call_grammar import FunctionSchema
from specengine.tool_calls.grammar import Enforced, write_grammar

_KEPT = 256  # schemas that were checked last: the tools of several agents
_LONGEST = 300  # characters of an error
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def make_constraint(body: ChatRequest, answer: AnswerFormat, tag_tokens: Mapping[str, int]) -> dict[str, Any]:
    """Returns the constraint as parameters of SamplingParams; empty for an answer that is only parsed.

    tag_tokens: ids of tags that are tokens, by their text.
    Raises ApiError naming the field of a schema that the grammar engine does not support.
    """
    content = constrain_text(body.constraint)
    functions = _functions(body)
    if not functions and (not content or answer.reasoning is None):
        return content
    several = body.parallel_tool_calls
    if several is None:
        several = answer.dialect is None or answer.dialect.parallel
    enforced = Enforced(
        functions=functions,
        required=_is_required(body),
        parallel=several and not isinstance(body.tool_choice, tuple),
        content=content,
    )
    try:
        return {"grammar": write_grammar(answer, enforced, tag_tokens)}
    except ValueError as error:
        assert body.constraint is not None
        field = body.constraint.field.partition(".")[0]
        raise ApiError(400, f"{field}: {error}", param=field) from error


def constrain_text(constraint: TextConstraint | None) -> dict[str, Any]:
    """Returns the constraint of a whole text as a parameter of SamplingParams; empty for any text."""
    if constraint is None:
        return {}
    value = constraint.value
    if constraint.kind == "json_schema":
        check_schema(value, constraint.field)
        value = value or {"type": "object"}
    return {constraint.kind: value}


def check_schema(schema: Mapping[str, Any], field: str) -> None:
    """Raises ApiError naming the field unless the grammar engine supports a schema."""
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise ApiError(400, f"{field}: is nested too deeply", param=field) from None
    try:
        check_multiples(schema, field)  # before they are compiled
    except ValueError as error:
        raise ApiError(400, str(error), param=field) from None
    if message := _find_error(text):
        raise ApiError(400, f"{field}: {message}", param=field)


@lru_cache(maxsize=_KEPT)
def _find_error(schema: str) -> str:
    from llguidance import LLMatcher  # 3 MB, needed by constrained requests alone

    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return " ".join(error.split())[:_LONGEST]


def _is_required(body: ChatRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, tuple)


def _functions(body: ChatRequest) -> tuple[FunctionSchema, ...]:
    """Returns the functions of an enforced answer; none where calls are only parsed.

    An answer with tools is enforced in four cases: a call is required, a function is strict, there may be one call at
    most, or an answer without calls is constrained.
    """
    tools = list(enumerate(body.offered_tools))
    if isinstance(body.tool_choice, tuple):
        tools = [(number, tool) for number, tool in tools if tool.function.name == body.tool_choice[0]]
    constrained = body.constraint is not None
    strict = any(tool.function.strict for _, tool in tools)
    if not (_is_required(body) or strict or body.parallel_tool_calls is False or constrained):
        return ()
    return tuple(
        FunctionSchema(tool.function.name, _schema(tool.function, _is_required(body), f"tools[{number}]"))
        for number, tool in tools
    )


def _schema(function: Function, required: bool, field: str) -> dict[str, Any]:
    """Returns the schema of a function's arguments that the grammar enforces.

    Strict functions: their own; else an unsupported keyword is left out, and without a required call the arguments
    are any object.
    """
    schema = {"type": "object", **(function.parameters or _NO_PARAMETERS)}
    if schema["type"] != "object":
        where = f"{field}.function.parameters"
        raise ApiError(400, f"{where}: expected a schema of type object, got {str(schema['type'])[:40]!r}", param=where)
    if not function.strict and not required:
        return {"type": "object"}
    if not function.strict:
        schema["x-guidance"] = {"lenient": True}
    check_schema(schema, f"{field}.function.parameters")
    return schema
