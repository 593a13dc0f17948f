"""Fields and values that cannot change an answer are accepted; unknown ones are, too, where an option says so."""

import json
import logging

import httpx
import openai
import pytest

from specengine.server import body
from specengine.server.chat.schema import ChatRequest
from specengine.server.schema import CompletionRequest
from tests.server.servers import ASK, HELLO, chat, problem, served

COMPLETION = {"model": "tiny", "prompt": "ab", "max_tokens": 5}
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def address():
    with served() as address:
        yield address


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("value", ["x", 7, {"a": "b"}, True, []], ids=str)
def test_fields_that_cannot_change_a_text_may_have_any_value(address, value):
    for kind, ask, path in (
        (ChatRequest, ASK, "/v1/chat/completions"),
        (CompletionRequest, COMPLETION, "/v1/completions"),
    ):
        ask = ask | {"temperature": 0}
        plain = text_of(chat(address, ask, path))
        assert text_of(chat(address, ask | dict.fromkeys(kind.ignored, value), path)) == plain


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"max_tokens": 5.0, "n": 1.0, "seed": 3.0, "top_k": 4.0}, {"seed": 3, "top_k": 4}),
        ({"stop_token_ids": [5.0], "min_tokens": 1.0, "seed": 3}, {"stop_token_ids": [5], "min_tokens": 1, "seed": 3}),
        ({"max_completion_tokens": 5.0, "logprobs": True, "top_logprobs": 2.0, "seed": 1}, {"seed": 1}),
        ({"temperature": 1e-5}, {"temperature": 0}),
        ({"temperature": 5e-324, "seed": 4}, {"temperature": 0}),
        ({"top_k": -1, "seed": 2}, {"seed": 2}),
        ({"seed": -1}, {"seed": 0}),
        ({"seed": -(2**63)}, {"seed": 2**63 - 1}),
        ({"stop": [f"{i}\n" for i in range(64)], "seed": 6}, {"seed": 6}),
        ({"whatever": None, "echo": None, "tools": None, "speculation": {"other": None}, "seed": 7}, {"seed": 7}),
        ({"tools": [], "seed": 8}, {"seed": 8}),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "seed": 8}, {"seed": 8}),
        ({"functions": [], "function_call": "none", "seed": 8}, {"seed": 8}),
        ({"reasoning_effort": "high", "seed": 9}, {"seed": 9}),
        ({"length_penalty": 1, "use_beam_search": False, "bad_words": [], "seed": 9}, {"seed": 9}),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **CACHED}]}], "seed": 5},
            {"seed": 5},
        ),
        ({"messages": [{"role": "user", "content": "hello", **CACHED, "other": None}], "seed": 5}, {"seed": 5}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_values_with_the_same_meaning_give_the_same_text(address, given, same):
    assert text_of(chat(address, ASK | given)) == text_of(chat(address, ASK | same))


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**62])
def test_the_seeds_that_statistics_name_give_the_samples_again(address, seed):
    stats = {"speculation": {"stats": True}}
    whole = chat(address, ASK | stats | {"seed": seed, "n": 3}).json()["choices"]
    for choice in whole:
        again = ASK | {"seed": choice["speculation"]["stats"]["seed"]}
        assert text_of(chat(address, again)) == choice["message"]["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_counts_the_tokens_of_each_text_in_every_chunk(address, path, n):
    ask = (ASK if "chat" in path else COMPLETION) | {"n": n, "stream": True, "max_tokens": 20, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    chunks = events_of(chat(address, ask | {"stream_options": options}, path))
    last = {}
    for chunk in chunks[:-1]:
        (choice,), usage = chunk["choices"], chunk["usage"]
        before = last.get(choice["index"], 0)
        last[choice["index"]] = usage["completion_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["completion_tokens"] >= before and usage["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]
    assert last == dict.fromkeys(range(n), 20) and chunks[-1]["usage"]["completion_tokens"] == 20 * n
    assert ("chat" not in path) or chunks[0]["usage"]["completion_tokens"] == 0
    for options, absent in (({"include_usage": True}, None), ({"continuous_usage_stats": True}, "none")):
        chunks = events_of(chat(address, ask | {"stream_options": options}, path))
        assert {chunk.get("usage", "none") for chunk in chunks if chunk["choices"]} == {absent}


def events_of(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_prompt_beyond_the_context_is_told_in_the_words_that_clients_look_for(address):
    """litellm looks for the first phrase, LangChain for the second, in the message."""
    long = [{"role": "user", "content": "x" * 600}]
    for asked in ({"messages": long}, {"messages": long, "max_tokens": None}, {"max_tokens": 600}):
        error = problem(chat(address, ASK | asked))
        assert (
            "this model's maximum context length is" in error["message"] and error["code"] == "context_length_exceeded"
        )
        assert "prompt is too long" in error["message"] and "512" in error["message"]


UNKNOWN = {
    "guided_whitespace_pattern": " ",
    "whatever\n": 5,
    "\ud83d": 1,
    "x" * 500: 1,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "tone": "mild"}], "mood": 1}],
    "speculation": {"speed": 5},
}


def test_unknown_fields_are_ignored_where_the_option_says_so_and_logged_once(address, caplog, monkeypatch):
    for name, value in UNKNOWN.items():
        assert chat(address, ASK | {name: value}).status_code == 400
    monkeypatch.setattr(body, "MOST_NAMES", 7)
    with served(ignore_unknown_fields=True) as lenient, caplog.at_level(logging.WARNING, "specengine"):
        for _ in range(2):
            assert text_of(chat(lenient, ASK | UNKNOWN | {"temperature": 0})) == text_of(
                chat(address, ASK | {"temperature": 0})
            )
        logged = [record.getMessage() for record in caplog.records if "ignored: " in record.getMessage()]
        assert len(logged) == 7 == len(set(logged)) and max(map(len, logged)) < 200
        assert not any("\n" in line for line in logged) and any("'tone'" in line for line in logged)
        for number in range(20):
            chat(lenient, ASK | {f"field-{number}": 1})
        assert len([record for record in caplog.records if "ignored: " in record.getMessage()]) == 7
        for refused in ({"modalities": ["audio"]}, {"echo": 1, "temperature": "x"}, {"max_tokens": "5"}):
            assert chat(lenient, ASK | refused).status_code == 400


def test_many_tools_are_checked_in_time_that_grows_with_their_number(monkeypatch):
    """Counts comparisons of names, which were quadratic."""

    class Name(str):
        compared = 0

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(300)]
    asked = ChatRequest.model_validate({"model": "x", "messages": HELLO, "tools": tools})
    for tool in asked.tools:
        tool.function.name = Name(tool.function.name)
    asked._check_tools()
    assert Name.compared < 3000
    with pytest.raises(ValueError, match=r"tools\[2\].function.name: 'f0' is the name of two tools"):
        ChatRequest.model_validate({"model": "x", "messages": HELLO, "tools": [*tools[:2], tools[0]]})


def test_the_official_client_streams_with_its_own_defaults(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "name": "ada", "content": "hi"}],
            max_tokens=3,
            store=True,
            metadata={"a": "b"},
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": True},
            service_tier="flex",
            extra_headers={"authorization": "bearer unused"},
        )
        assert [*stream][-1].usage.completion_tokens <= 3
