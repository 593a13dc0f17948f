"""Turns tools and the constraint of a text into that of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from specengine.constraints.schemas import Coverage, fit_schema
from specengine.server.chat.schema import ChatRequest
from specengine.server.chat.tools import Function
from specengine.server.constraint_fields import TextConstraint
from specengine.server.errors import ApiError, make_field_error
from specengine.tool_calls.answer_parser import AnswerFormat
from specengine.tool_calls.call_grammar import FunctionSchema
from specengine.tool_calls.grammar import Enforced, write_grammar
from specengine.types import SamplingParams

_KEPT, _LONGEST = 256, 16_384  # schemas that were fitted last, the tools of several agents; their characters, at most
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
        field = body.constraint.field
        raise ApiError(400, f"{field}: {str(error).removeprefix('grammar: ')}", param=field) from error


def constrain_text(constraint: TextConstraint | None) -> dict[str, Any]:
    """Returns the constraint of a whole text as a parameter of SamplingParams; empty for any text.

    Raises ApiError naming the field.
    """
    if constraint is None:
        return {}
    value = constraint.value
    if constraint.kind == "json_schema":
        value = fit(value or {"type": "object"}, constraint.field, "strict" if constraint.strict else "whole")
    content = {constraint.kind: value}
    try:
        SamplingParams(**content)  # checks it, also where it becomes a part of a grammar
    except ValueError as error:
        raise make_field_error(error, "", constraint.field) from error
    return content


def fit(schema: Mapping[str, Any], field: str, coverage: Coverage) -> dict[str, Any]:
    """Returns a schema that the grammar engine holds, with closed objects, see fit_schema().

    Raises ApiError naming the field, the place in it and the reason.
    """
    try:
        text = json.dumps(schema)
        return json.loads((_fitted if len(text) <= _LONGEST else _fitted.__wrapped__)(text, field, coverage))
    except RecursionError:
        raise ApiError(400, f"{field}: is nested too deeply", param=field) from None
    except ValueError as error:
        raise ApiError(400, str(error), param=field) from None


@lru_cache(maxsize=_KEPT)
def _fitted(schema: str, field: str, coverage: Coverage) -> str:
    return json.dumps(fit_schema(json.loads(schema), field, coverage, closed=True))


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

    Strict functions: their own; else what the engine lacks is left out, and without a required call the arguments are
    any object.
    """
    parameters = function.parameters or _NO_PARAMETERS
    schema = {**parameters, "type": "object"}  # an answer has no other arguments
    where = f"{field}.function.parameters"
    kind = parameters.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise ApiError(400, f"{where}: expected a schema of type object, got {str(kind)[:40]!r}", param=where)
    if not function.strict and not required:
        return {"type": "object"}
    return fit(schema, where, "strict" if function.strict else "lenient")
