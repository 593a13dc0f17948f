"""OpenAI's client drives tools through two rounds of call, tool message and answer, with the small model."""

import json

import openai
import pytest

from specengine.tensor_parallel.loading import load_model
from tests.server.servers import served

pytestmark = pytest.mark.model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "convert_temperature",
            "description": "Convert degrees",
            "parameters": {
                "type": "object",
                "properties": {"degrees": {"type": "number"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["degrees", "unit"],
                "additionalProperties": False,
            },
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
QUESTIONS = [
    ("What is the weather in Paris?", "required", "It is sunny, 21 degrees celsius."),
    (
        "How much is 21 degrees celsius in fahrenheit?",
        {"type": "function", "function": {"name": "convert_temperature"}},
        "69.8",
    ),
]


@pytest.fixture(scope="module")
def client(smollm2_path):
    model = load_model(smollm2_path, device="cpu")
    with (
        served(model, name="smollm2-135m", drafters=("prompt_lookup", "none")) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, messages: list, streamed: bool, **more) -> tuple[dict, str]:
    """Returns the assistant's message and the reason of its end."""
    asked = {"model": "smollm2-135m", "messages": messages, "temperature": 0, "tools": TOOLS, "max_tokens": 120, **more}
    if not streamed:
        (choice,) = client.chat.completions.create(**asked).choices
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    with client.chat.completions.stream(**asked) as stream:  # the client's own code joins the chunks
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


def converse(client: openai.OpenAI, streamed: bool, **more) -> list[dict]:
    jsonschema = pytest.importorskip("jsonschema")
    messages: list[dict] = []
    for question, choice, result in QUESTIONS:
        messages.append({"role": "user", "content": question})
        message, reason = ask(client, messages, streamed, tool_choice=choice, parallel_tool_calls=False, **more)
        (call,) = message["tool_calls"]
        assert reason == "tool_calls" and not message.get("content")
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        answer, reason = ask(client, messages, streamed, **more)
        assert answer["content"] and "tool_calls" not in answer and reason in ("stop", "length")
        messages.append(answer)
    return messages


def said(messages: list[dict]) -> list:
    """The conversation without ids, which differ."""
    return [
        (message["role"], message.get("content"), [call["function"] for call in message.get("tool_calls", ())])
        for message in messages
    ]


@pytest.mark.quick(1)
def test_two_rounds_of_call_tool_and_answer(client):
    whole = said(converse(client, streamed=False))
    assert said(converse(client, streamed=True)) == whole
    names = [calls[0]["name"] for _, _, calls in whole if calls]
    assert names[1] == "convert_temperature" and "celsius" in whole[5][2][0]["arguments"]


@pytest.mark.full
def test_drafting_changes_no_call(client):
    plain = said(converse(client, streamed=True, extra_body={"speculation": {"off": True}}))
    assert said(converse(client, streamed=True)) == plain


@pytest.mark.full
def test_sampled_calls_are_valid_for_every_seed(client):
    for seed in range(3):
        converse(client, streamed=True, temperature=0.8, seed=seed)


def test_an_answer_follows_its_schema(client):
    jsonschema = pytest.importorskip("jsonschema")
    schema = SCHEMAS["get_weather"]
    response_format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    (choice,) = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Weather in Rome for 3 days, as JSON."}],
        response_format=response_format,
        temperature=0,
        max_tokens=80,
    ).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), schema)
