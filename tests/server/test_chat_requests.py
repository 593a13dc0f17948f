"""Tools and schemas of a chat constrain its answer, and requests that make no sense are refused by name."""

import openai
import pytest

from specengine.server.chat.schema import ChatRequest
from tests.server import tools
from tests.server.constrained import ANY_OBJECT, FREE, NAMED, OBJECT, ONE, accepts
from tests.server.tools import ASK, NOW, TOOL

STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
ANY = {"type": "function", "function": {"name": "any", "parameters": {"type": "object", "if": {}}}}
NULLABLE = {"type": "function", "function": {"name": "now", "parameters": {"type": ["object", "null"]}}}
KEYS = {"city": {"type": "string", "pattern": "(?=x)"}, "day": {"$ref": "https://example.org/day"}}
LACKING = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": KEYS}},
}
LACKING_STRICT = {"type": "function", "function": {**LACKING["function"], "strict": True}}
MORE = ONE.replace("}}", ', "more": 1}}')
OPEN = {"type": "object", "properties": {"city": {"type": "string", "format": "path"}}}
FORMAT_STRICT = {"type": "function", "function": {"name": "f", "parameters": OPEN, "strict": True}}
WRONG = ONE.replace('"x"', "1")
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"tools": [TOOL, NOW]}, None, None),
        ({"tools": [TOOL, NOW], "tool_choice": "auto", "parallel_tool_calls": True}, None, None),
        ({"tools": [TOOL, NOW], "tool_choice": "required"}, [ONE, f"{ONE}\n{OTHER}"], [WRONG, FREE]),
        ({"tools": [TOOL, NOW], "tool_choice": NAMED}, [OTHER], [ONE, f"{OTHER}\n{OTHER}", FREE]),
        ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, [ONE], [f"{ONE}\n{ONE}"]),
        ({"tools": [TOOL, NOW], "parallel_tool_calls": False}, [WRONG, FREE, FREE + OTHER], [f"{ONE}\n{OTHER}"]),
        ({"tools": [STRICT, NOW]}, [ONE, FREE, FREE + ONE + FREE, OTHER.replace("{}", OBJECT)], [WRONG, FREE + WRONG]),
        ({"tools": [ANY], "tool_choice": "required"}, [OTHER.replace("now", "any")], [OTHER]),
        ({"tools": [LACKING], "tool_choice": "required"}, [ONE, ONE.replace('"city": "x"', "")], [WRONG, MORE]),
        ({"tools": [LACKING]}, None, None),
        ({"tools": [NULLABLE], "tool_choice": "required"}, [OTHER], [OTHER.replace("{}", "null")]),
        ({"response_format": OPEN}, [OBJECT, "{}"], ['{"city": "x", "more": 1}', '{"more": 1}', "[]"]),
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, [OBJECT, "{}"], ["[]", FREE]),
        ({"response_format": TOOL["function"]["parameters"]}, [OBJECT], ["{}", FREE]),
        ({"response_format": ANY_OBJECT}, [OBJECT, "{}"], ["[]", '"x"', FREE]),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, [OBJECT, ONE, WRONG], [FREE]),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "none"}, [OBJECT], [ONE]),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "required"}, [ONE], [OBJECT]),
    ],
    ids=lambda value: str(value)[:70],
)
@pytest.mark.parametrize("name", ["hermes", "thinking"])
def test_a_request_constrains_its_answer(serve, name, asked, good, bad):
    if asked.get("response_format", {}).get("type") == "object":
        asked = schema_format(asked["response_format"])
    client, script = serve(name, "x" if name == "hermes" else "x</think>x")
    client.chat.completions.create(**ASK, **asked)
    (params,) = script.params
    if good is None:
        assert params.json_schema is None and params.grammar is None
        return
    thought = "Hm.</think>\n" if name == "thinking" else ""
    assert (params.json_schema is None) == bool((asked.get("tools") and asked.get("tool_choice") != "none") or thought)
    assert [accepts(name, params, thought + text) for text in good] == [True] * len(good)
    assert [accepts(name, params, thought + text) for text in bad] == [False] * len(bad)
    if thought:
        assert not any(accepts(name, params, text) for text in (*good, *bad))


def test_llama_calls_one_tool_unless_the_request_says_more(serve):
    """Its template refuses a message with several calls."""
    one = ONE.partition("\n")[2].partition("\n")[0].replace("arguments", "parameters")
    client, script = serve("llama-json", "x")
    for several, accepted in ((None, False), (False, False), (True, True)):
        client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=several)
        (params,) = script.params
        assert accepts("llama-json", params, one) and accepts("llama-json", params, f"{one}; {one}") is accepted


def test_a_schema_and_free_calls_in_json_exclude_each_other(serve):
    client, _ = serve("llama-json", "x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, tools=[TOOL], response_format={"type": "json_object"})
    assert refused.value.param == "response_format"


CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
BAD_CALL = {**CALL, "function": {"name": "f", "arguments": "{"}}
ONLY_NAME = {"type": "json_schema", "json_schema": {"name": "x"}}
TEXT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "text"}}}


def schema_format(schema: object, **more) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL, NOW, TOOL]}, "tools[2].function.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (schema_format(BAD_SCHEMA), "response_format.json_schema.schema"),
        (schema_format({"type": "integer", "multipleOf": 999983}), "response_format.json_schema.schema"),
        (schema_format({"type": "string", "format": "nonsense"}, strict=True), "response_format.json_schema.schema"),
        (
            {"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA, "strict": True}}]},
            "tools[1].function.parameters",
        ),
        ({"tools": [LACKING_STRICT]}, "tools[0].function.parameters"),
        ({"tools": [FORMAT_STRICT]}, "tools[0].function.parameters"),
        ({"tools": [TEXT_TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"nonsense": 1}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_what_a_chat_cannot_have_is_refused_by_name(serve, asked, field):
    client, _ = serve("thinking", "x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASK, **asked})
    assert refused.value.param == field and field.split("[")[0].split(".")[0] in refused.value.message


def test_a_refused_pattern_is_told_with_its_place(serve):
    client, _ = serve("hermes", "x")
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        client.chat.completions.create(**ASK, **schema_format({"type": "string", "pattern": "(a"}))


def test_an_answer_cut_in_its_reasoning_and_a_call_without_arguments_may_be_sent_back(serve):
    client, _ = serve("thinking", "x</think>x")
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    assert client.chat.completions.create(**{**ASK, "messages": messages}).choices[0].message.content == "x"


def test_a_schema_that_is_nested_too_deeply_is_refused(serve):
    schema: dict = {}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    client, _ = serve("hermes", "x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, **schema_format(schema))
    assert refused.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("choice", "field"),
    [("required", "tools"), (NAMED, "tools"), ("auto", "response_format"), ("none", "response_format")],
    ids=lambda value: str(value)[:20],
)
def test_a_constraint_s_fault_is_told_of_the_field_that_it_comes_from(choice, field):
    asked = {"model": "x", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL, NOW]}
    body = ChatRequest.model_validate({**asked, "response_format": {"type": "json_object"}, "tool_choice": choice})
    assert body.constraint_field == field


def test_a_dialect_needs_a_template_that_reads_tools(serve):
    with pytest.raises(ValueError, match="tool_dialect: "):
        serve("plain", "x", tool_dialect="mistral")
    for setting in ("tool_dialect", "reasoning"):
        with pytest.raises(ValueError, match=f"{setting}: expected one of auto, "):
            serve("plain", "x", **{setting: "nonsense"})


def test_a_template_that_is_not_valid_is_named_when_a_chat_comes_and_lets_raw_prompts_through(serve):
    client, _ = serve("broken", "x", tool_dialect="mistral")
    for more in ({}, {"tools": [TOOL]}):
        with pytest.raises(openai.BadRequestError, match="messages: chat template is not valid Jinja: Exp"):
            client.chat.completions.create(**ASK, **more)
    assert client.completions.create(model=ASK["model"], prompt="a").choices[0].text == "x"


def test_tools_of_an_unknown_dialect_are_refused(serve):
    client, _ = serve("unknown", "x")
    with pytest.raises(openai.BadRequestError, match="--tool-dialect") as refused:
        client.chat.completions.create(**ASK, tools=[TOOL])
    assert refused.value.param == "tools"
    client.chat.completions.create(**ASK)


NOW_CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
NAMES = (
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CACHED = {"cache_control": {"type": "ephemeral"}}


def test_names_of_all_roles_reach_the_template(serve, monkeypatch):
    monkeypatch.setitem(tools.TEMPLATES, "names", NAMES)
    client, script = serve("names", "x")
    roles = ("developer", "system", "user", "assistant")
    messages = [{"role": role, "name": f"n-{role}", "content": role} for role in roles]
    messages += [
        {"role": "assistant", "content": None, "refusal": "I cannot.", "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "refusal": None},
        {"role": "assistant", "content": None, "tool_calls": [NOW_CALL | CACHED]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "content": "one", "name": "clock"},
    ]
    client.chat.completions.create(**ASK | {"messages": messages[:6]})
    assert script.prompts[0].endswith(
        "[system n-developer]developer[system n-system]system[user n-user]user[assistant n-assistant]assistant"
        "[assistant]I cannot.[assistant]No.[assistant]"
    )
    client.chat.completions.create(**ASK | {"messages": messages[2:]})
    assert "[user n-user]user" in script.prompts[0]  # the template reads no tools: they are written as text
    tool = TOOL | CACHED | {"function": TOOL["function"] | CACHED | {"strict": None}}
    client, script = serve("hermes", "x")
    client.chat.completions.create(**ASK, tools=[TOOL])
    plain = script.prompts
    client.chat.completions.create(**ASK, tools=[tool])
    assert script.prompts == plain
    client.chat.completions.create(**ASK | {"messages": messages[6:]}, tools=[TOOL])
    assert script.prompts[0].endswith("[tool]noon(of now)[tool]one(of clock)[assistant]")
