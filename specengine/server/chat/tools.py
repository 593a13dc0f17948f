"""The fields of chats that describe tools, calls and the form of an answer."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from specengine.server.body import Body, Unsupported
from specengine.server.fields import Integer, make_error
from specengine.tool_calls.json_arguments import as_object

# OpenAI's own limit. Names stand unquoted in some dialects, so other characters could end them.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})


class Tool(Body):
    type: Literal["function"]
    function: Function

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    @property
    def template_tool(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        given = {"name": self.function.name, "description": self.function.description}
        function = {key: value for key, value in given.items() if value is not None}
        return {"type": "function", "function": {**function, "parameters": self.function.parameters}}


def _parse_arguments(value: Any) -> Any:
    """Returns the object that a string of JSON holds, and another string as it is."""
    if not isinstance(value, str | dict):
        raise make_error("expected a string that holds a JSON object, or an object")
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else value


class FunctionCall(Body):
    """The function that an earlier answer called. The arguments are any text, because a call may have been cut."""

    name: str
    arguments: Annotated[dict[str, Any] | str, BeforeValidator(_parse_arguments)] = ""

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The arguments as an object, which templates take. A call that was cut is closed.

        Text that holds no object becomes the value of the key `arguments`. A half of a character, where a call was cut,
        becomes U+FFFD.
        """
        parsed: Any = self.arguments
        try:
            if isinstance(parsed, str):
                parsed = json.loads(as_object(parsed.strip()))
        except (ValueError, RecursionError):  # an integer of too many digits; brackets without end
            parsed = None
        text = json.dumps(parsed if isinstance(parsed, dict) else {"arguments": self.arguments}, ensure_ascii=False)
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


class ToolCall(Body):
    """A call of an earlier answer.  index: what clients keep that join the parts of a stream; it changes nothing."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Integer | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    @property
    def template_call(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        function = {"name": self.function.name, "arguments": self.function.template_arguments}
        return {"id": self.id, "type": "function", "function": function}


_CHOICES = "expected 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"


def _parse_tool_choice(value: Any) -> Any:
    """Returns the choice as a word, or the named function as a tuple."""
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise make_error(_CHOICES)
    return (function["name"],)


ToolChoice = Annotated[Any, BeforeValidator(_parse_tool_choice)]


class JsonSchema(Body):
    """The schema always holds.  strict: it may not have unknown formats either, which are ignored otherwise."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of a text.  bare_schema: the field `schema` of llama.cpp, which has no wrapper around it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    bare_schema: dict[str, Any] | None = Field(None, alias="schema")

    unsupported: ClassVar[Unsupported] = {}

    @model_validator(mode="after")
    def _check_schemas(self) -> ResponseFormat:
        if self.json_schema is not None and self.type != "json_schema":
            raise make_error("json_schema: needs the type 'json_schema'")
        if self.bare_schema is not None and (self.type == "text" or self.json_schema is not None):
            raise make_error("schema: needs the type 'json_object', or 'json_schema' without json_schema")
        if self.type == "json_schema" and self.json_schema is None and self.bare_schema is None:
            raise make_error("json_schema: is missing")
        return self

    @property
    def strict(self) -> bool:
        return bool(self.json_schema and self.json_schema.strict)

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema of the text, or None for any text."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return {} if self.type == "json_object" and self.bare_schema is None else self.bare_schema

    @property
    def field(self) -> str:
        """The field of the schema."""
        if self.json_schema is not None:
            return "response_format.json_schema.schema"
        return "response_format" if self.bare_schema is None else "response_format.schema"
