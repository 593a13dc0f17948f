"""The constraints of other servers' clients reach the engine, one at a time and under their own names."""

import openai
import pytest
from pydantic import ValidationError

from specengine.constraints.schemas import fit_schema
from specengine.server.chat.constraint import constrain_text
from specengine.server.chat.schema import ChatRequest
from specengine.server.constraint_fields import TextConstraint
from specengine.server.errors import ApiError
from specengine.server.schema import CompletionRequest
from tests.selection import looped
from tests.server.constrained import ANY_OBJECT, FREE, NAMED, OBJECT, ONE, accepts
from tests.server.tools import ASK, NOW, TOOL

SCHEMA = TOOL["function"]["parameters"]
TEXT = '{"type": "object", "properties": {"city": {"type": "string"}}}'
GBNF, LARK = 'root ::= "a" root | "b"', 'start: "a"'
WRAPPED = {"name": "x", "schema": SCHEMA}
BODIES = [
    (CompletionRequest, {"model": "x", "prompt": "x"}),
    (ChatRequest, {"model": "x", "messages": ASK["messages"]}),
]

SPELLINGS = {
    "response_format": {
        "": [({"type": "json_object"}, "json_schema", {})],
        "json_schema.schema": [({"type": "json_schema", "json_schema": WRAPPED}, "json_schema", SCHEMA)],
        "schema": [
            ({"type": "json_object", "schema": SCHEMA}, "json_schema", SCHEMA),
            ({"type": "json_schema", "schema": SCHEMA}, "json_schema", SCHEMA),
        ],
    },
    "structured_outputs": {
        "json": [({"json": SCHEMA}, "json_schema", SCHEMA), ({"json": TEXT}, "json_schema", None)],
        "regex": [({"regex": "a+", "choice": None, "disable_any_whitespace": True}, "regex", "a+")],
        "choice": [({"choice": ["yes", "no"], "json_object": False}, "choices", ["yes", "no"])],
        "grammar": [({"grammar": GBNF}, "grammar", GBNF), ({"grammar": LARK}, "grammar", LARK)],
        "json_object": [({"json_object": True}, "json_schema", {})],
    },
    "guided_json": {"": [(SCHEMA, "json_schema", SCHEMA), (TEXT, "json_schema", None)]},
    "guided_regex": {"": [("a+", "regex", "a+")]},
    "guided_choice": {"": [(["a"], "choices", ["a"])]},
    "guided_grammar": {"": [(LARK, "grammar", LARK)]},
    "json_schema": {"": [(SCHEMA, "json_schema", SCHEMA), (TEXT, "json_schema", None), ({}, "json_schema", {})]},
    "regex": {"": [("a+", "regex", "a+")]},
    "ebnf": {"": [(GBNF, "grammar", GBNF)]},
    "grammar": {"": [(GBNF, "grammar", GBNF)]},
}
CASES = [
    (name, f"{name}.{inner}".rstrip("."), *case)
    for name, fields in SPELLINGS.items()
    for inner, cases in fields.items()
    for case in cases
]


@looped("name, field, value, kind, meant", CASES)
def test_every_spelling_of_a_constraint_is_one_parameter_of_the_engine(name, field, value, kind, meant):
    for made, body in BODIES:
        constraint = made.model_validate({**body, name: value, "user": None, "guided_decoding_backend": "x"}).constraint
        meant = {"type": "object", "properties": {"city": {"type": "string"}}} if meant is None else meant
        assert constraint == TextConstraint(field, kind, meant)
        fitted = fit_schema(meant or {"type": "object"}, field, closed=True) if kind == "json_schema" else meant
        assert constrain_text(constraint) == {kind: fitted}


def test_two_constraints_are_refused_by_both_names():
    for made, body in BODIES:
        for number, (name, field, value, *_) in enumerate(CASES):
            for other, second, more, *_ in CASES[:number]:
                if name != other:
                    with pytest.raises(ValidationError) as refused:
                        made.model_validate({**body, name: value, other: more})
                    assert field in str(refused.value) and second in str(refused.value)
        with pytest.raises(ValidationError, match=r"structured_outputs.choice: .*structured_outputs.regex"):
            made.model_validate({**body, "structured_outputs": {"regex": "a", "choice": ["a"]}})


@looped(
    "given, field",
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {"type": "string", "pattern": "("}}}, "structured_outputs.json"),
        ({"guided_json": True}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"regex": 3}, "regex"),
        ({"ebnf": ""}, "ebnf"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"grammar": 'start: "a'}, "grammar"),
        ({"grammar": "root ::= a"}, "grammar"),
        ({"structured_outputs": {"grammar": "root ::= a"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"regex": ""}, "regex"),
        ({"response_format": ANY_OBJECT, "regex": "a"}, "regex"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"json_schema": {"type": "string", "enum": []}}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": {"pattern": "("}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": WRAPPED}}, "response_format.json_schema"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 901}, "min_tokens"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ],
)
def test_a_faulty_field_is_named(serve, given, field):
    client, _ = serve("hermes", "x")
    for create in (
        lambda: client.chat.completions.create(**ASK, extra_body=given),
        lambda: client.chat.completions.create(**ASK, tools=[TOOL, NOW], extra_body=given),
        lambda: client.completions.create(model="tiny", prompt="x", max_tokens=900, extra_body=given),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            create()
        assert refused.value.param == field and refused.value.body["message"].startswith(f"{field}: ")
        assert not refused.value.body["message"].startswith(f"{field}: {field}: ")


KINDS = [
    ({"guided_regex": "a/b\n?"}, ["a/b", "a/b\n"], ["a/", FREE]),
    ({"guided_choice": ["a/b", "x|y"]}, ["a/b", "x|y"], ["a", "x", FREE]),
    ({"guided_grammar": GBNF}, ["b", "aab"], ["a", FREE]),
    ({"guided_grammar": 'start: A "}" // }\nA: /[{}]/'}, ["{}", "}}"], ["}", FREE]),
    ({"guided_json": {"type": "integer"}}, ["12"], ["x", FREE]),
]


@looped("given, good, bad", KINDS)
def test_a_constraint_holds_behind_reasoning_and_beside_calls(serve, given, good, bad):
    client, script = serve("thinking", "x</think>x")
    client.chat.completions.create(**ASK, extra_body=given)
    (params,) = script.params
    assert [accepts("thinking", params, f"Hm.</think>\n{text}") for text in good] == [True] * len(good)
    assert not any(accepts("thinking", params, f"Hm.</think>\n{text}") for text in bad)
    client, script = serve("hermes", "x")
    client.chat.completions.create(**ASK, tools=[TOOL, NOW], extra_body=given)
    (params,) = script.params
    assert [accepts("hermes", params, text) for text in (*good, ONE)] == [True] * (len(good) + 1)
    assert not any(accepts("hermes", params, text) for text in bad)
    client.chat.completions.create(**ASK, tools=[TOOL, NOW], tool_choice="required", extra_body=given)
    (params,) = script.params
    assert accepts("hermes", params, ONE) and not any(accepts("hermes", params, text) for text in (*good, *bad))
    with pytest.raises(openai.BadRequestError, match=f"tool_choice: .*{next(iter(given))}"):
        client.chat.completions.create(**ASK, tools=[TOOL, NOW], tool_choice=NAMED, extra_body=given)


def test_an_empty_grammar_is_none_and_a_response_format_may_stand_beside_a_named_function(serve):
    client, script = serve("hermes", "x")
    client.chat.completions.create(**ASK, extra_body={"grammar": ""})
    assert script.params[0].constraint is None
    client.chat.completions.create(**ASK, tools=[TOOL, NOW], tool_choice=NAMED, response_format=ANY_OBJECT)
    assert not accepts("hermes", script.params[0], OBJECT)


def test_json_calls_cannot_be_told_from_constrained_content(serve):
    client, _ = serve("llama-json", "x")
    with pytest.raises(openai.BadRequestError, match="guided_regex: this model's calls are JSON too") as refused:
        client.chat.completions.create(**ASK, tools=[TOOL], extra_body={"guided_regex": "a"})
    assert refused.value.param == "guided_regex"


def test_a_schema_is_checked_before_it_is_compiled():
    with pytest.raises(ApiError, match=r"^guided_json: /multipleOf"):
        constrain_text(TextConstraint("guided_json", "json_schema", {"multipleOf": 999983}))
