"""The fields that constrain a text, in the spelling of OpenAI, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from specengine.server.body import Body, Unsupported
from specengine.server.chat.tools import ResponseFormat
from specengine.server.fields import make_error


def _parse_schema(value: Any) -> Any:
    """Returns the object of a schema, which may come as its JSON text."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise make_error("expected a JSON schema: an object, or a string that holds one")
    return parsed


Schema = Annotated[dict[str, Any] | None, BeforeValidator(_parse_schema)]


@dataclass(frozen=True)
class TextConstraint:
    """What a text must be.  field: of the request.  kind, value: a parameter of SamplingParams.

    strict: whether a schema may lose nothing that the engine lacks.
    """

    field: str
    kind: str
    value: Any
    strict: bool = False


class StructuredOutputs(Body):
    """vLLM's object of constraints. White space in JSON is fixed here, so disable_any_whitespace changes nothing."""

    json_schema: Schema = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None

    unsupported: ClassVar[Unsupported] = {
        "disable_additional_properties": ("say it in the schema", False),
        "structural_tag": ("tools constrain calls",),
        "whitespace_pattern": ("JSON is written in one form",),
    }

    @model_validator(mode="after")
    def _check_kinds(self) -> StructuredOutputs:
        if not any(self.constraints):
            raise make_error("expected one of json, regex, choice, grammar and json_object")
        return self

    @property
    def constraints(self) -> list[TextConstraint]:
        """The constraints, of which there should be one."""
        return _given(
            ("structured_outputs.json", "json_schema", self.json_schema),
            ("structured_outputs.regex", "regex", self.regex),
            ("structured_outputs.choice", "choices", self.choice),
            ("structured_outputs.grammar", "grammar", self.grammar),
            ("structured_outputs.json_object", "json_schema", {} if self.json_object else None),
        )


class ConstrainedRequest(Body):
    """The constraints of a text. One of the fields at most may be given; each has its kind in SamplingParams.

    grammar, guided_grammar, ebnf: GBNF or Lark. An empty `grammar` is none, as in llama.cpp.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: Schema = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check_one_constraint(self) -> ConstrainedRequest:
        given = [constraint.field for constraint in self._constraints]
        if len(given) > 1:
            raise make_error(f"{given[1]}: a text has one constraint at most, {given[0]} is given too")
        return self

    @property
    def constraint(self) -> TextConstraint | None:
        """The constraint of the text, or of an answer without calls."""
        return next(iter(self._constraints), None)

    @property
    def _constraints(self) -> list[TextConstraint]:
        form = self.response_format
        of_form = (form.field, "json_schema", form.schema_of_answer, form.strict) if form else ("", "", None)
        return [
            *_given(of_form),
            *(self.structured_outputs.constraints if self.structured_outputs else ()),
            *_given(
                ("guided_json", "json_schema", self.guided_json),
                ("guided_regex", "regex", self.guided_regex),
                ("guided_choice", "choices", self.guided_choice),
                ("guided_grammar", "grammar", self.guided_grammar),
                ("json_schema", "json_schema", self.json_schema),
                ("regex", "regex", self.regex),
                ("ebnf", "grammar", self.ebnf),
                ("grammar", "grammar", self.grammar or None),
            ),
        ]


def _given(*constraints: tuple[Any, ...]) -> list[TextConstraint]:
    return [TextConstraint(*each) for each in constraints if each[2] is not None]
