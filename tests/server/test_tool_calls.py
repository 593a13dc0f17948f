"""OpenAI's client gets tool calls and reasoning, streamed and whole, in every dialect."""

import json

import pytest

from tests.selection import looped
from tests.server.tools import ASK, CALLED, NOW, SAID, TOOL, XML


def joined(stream) -> list[dict]:
    """Joins the chunks of a stream as OpenAI's clients do: text fields are concatenated, calls by their index."""
    choices: dict[int, dict] = {}
    for chunk in stream:
        for choice in chunk.choices:
            own = choices.setdefault(choice.index, {"calls": [], "logprobs": [], "reason": None, "tokens": []})
            assert own["reason"] is None, "something follows the end"
            delta = choice.delta.model_dump(exclude_unset=True)
            assert set(delta) <= {"role", "content", "reasoning", "reasoning_content", "tool_calls"}
            for name in ("content", "reasoning", "reasoning_content"):
                if delta.get(name):
                    own[name] = own.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(own["calls"]):
                    assert call["id"] and call["type"] == "function" and call["function"]["name"]
                    assert call["function"]["arguments"] == ""
                    own["calls"].append(call)
                else:
                    assert call["index"] == len(own["calls"]) - 1 and set(call) == {"index", "function"}
                    own["calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
            own["logprobs"] += choice.logprobs.content if choice.logprobs else []
            own["tokens"] += (choice.model_extra.get("speculation") or {}).get("tokens", [])
            own["reason"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)]


def both(client, **asked) -> tuple[list, list[dict]]:
    """Asks for a whole answer and for a stream, checks that they agree, and returns both."""
    whole = client.chat.completions.create(**{**ASK, **asked}).choices
    streamed = joined(client.chat.completions.create(**{**ASK, **asked}, stream=True))
    for choice, own in zip(whole, streamed, strict=True):
        assert choice.finish_reason == own["reason"]
        assert (choice.message.content or "") == own.get("content", "")
        reasoning = choice.message.model_extra.get("reasoning_content")
        assert reasoning == choice.message.model_extra.get("reasoning") == own.get("reasoning_content")
        assert own.get("reasoning") == own.get("reasoning_content")
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        assert calls == [(call["function"]["name"], call["function"]["arguments"]) for call in own["calls"]]
    return whole, streamed


@pytest.mark.parametrize("size", [7, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("dialect", SAID)
def test_a_call_is_found_in_every_dialect(serve, dialect, size):
    client, script = serve(dialect, SAID[dialect], sizes=(size,))
    (choice,), _ = both(client, tools=[TOOL, NOW])
    (call,) = choice.message.tool_calls
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == CALLED
    assert json.dumps(TOOL) in script.prompts[0].replace(
        '{"type": "function", "function"', '{"type": "function", "function"'
    )
    if dialect.startswith("mistral"):
        assert len(call.id) == 9 and call.id.isalnum()
    else:
        assert call.id.startswith("call_")


def test_the_model_s_own_text_is_read_with_any_tokens_in_a_cycle(serve):
    text = "I think so.\n</think>\n\nLet me see.\n" + SAID["hermes"] + "\n" + SAID["hermes"] + "\n"
    for sizes in ((1,), (3, 1, 4), (40,), (400,)):
        client, _ = serve("thinking", text, sizes=sizes)
        (choice,), _ = both(client, tools=[TOOL])
        assert choice.message.content == "Let me see." and choice.message.reasoning == "I think so."
        first, second = choice.message.tool_calls
        assert first.id != second.id and json.loads(second.function.arguments) == CALLED


def test_two_rounds_of_a_conversation_reach_the_template(serve):
    """The messages are the client's own objects, as its documentation says."""
    client, script = serve("hermes", SAID["hermes"])
    messages = [*ASK["messages"]]
    answer = client.chat.completions.create(**{**ASK, "messages": messages}, tools=[TOOL]).choices[0].message
    (call,) = answer.tool_calls
    messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "sunny"}]}]
    script.texts = ["It is sunny."]
    (choice,), _ = both(client, messages=messages, tools=[TOOL])
    assert choice.message.content == "It is sunny." and choice.finish_reason == "stop" and not choice.message.tool_calls
    assert script.prompts[0].endswith(
        "[user]hi[assistant](called get_weather in Paris \u00e9)[tool]sunny(of get_weather)[assistant]"
    )


def test_messages_of_a_joined_stream_are_accepted(serve):
    """Such calls keep their index, and the reasoning stands in both fields."""
    client, script = serve("thinking", "Hm.</think>" + SAID["hermes"])
    (own,) = joined(client.chat.completions.create(**ASK, tools=[TOOL], stream=True))
    message = {"role": "assistant", "content": None, "tool_calls": own["calls"], "reasoning": own["reasoning"]}
    result = {"role": "tool", "tool_call_id": own["calls"][0]["id"], "content": "sunny"}
    client.chat.completions.create(**{**ASK, "messages": [*ASK["messages"], message, result]}, tools=[TOOL])
    assert "[assistant](thought Hm.)(called get_weather in Paris \u00e9)[tool]sunny" in script.prompts[0]


def test_a_template_without_tools_gets_them_as_text(serve):
    client, script = serve("plain", SAID["hermes"])
    (choice,), _ = both(client, tools=[TOOL], messages=[{"role": "system", "content": "Be kind."}, *ASK["messages"]])
    (call,) = choice.message.tool_calls
    assert json.dumps(TOOL) in script.prompts[0] and script.prompts[0].startswith("[system]Be kind.\n\n# Tools")
    messages = [*ASK["messages"], choice.message]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": text} for text in ("one", "two")]
    both(client, tools=[TOOL], messages=messages)
    responses = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    written = json.dumps({"name": "get_weather", "arguments": CALLED}, ensure_ascii=False)
    assert script.prompts[0].endswith(
        f"[user]hi[assistant]<tool_call>\n{written}\n</tool_call>[user]{responses}[assistant]"
    )
    both(client, messages=messages)  # without tools the conversation still has its calls
    assert "# Tools" not in script.prompts[0] and responses in script.prompts[0]


def test_no_call_is_found_without_tools_or_with_none(serve):
    client, script = serve("hermes", SAID["hermes"])
    for asked in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        (choice,), _ = both(client, **asked)
        assert choice.message.content == SAID["hermes"] and choice.finish_reason == "stop"
        assert choice.message.tool_calls is None and "[tool]" not in script.prompts[0]


def test_reasoning_is_split_where_the_template_opens_it_or_the_model_does(serve):
    text = "First <b>.\n</think>\n\nThen."
    for said, more in ((text, {}), ("<think>\n" + text, {"chat_template_kwargs": {"enable_thinking": False}})):
        client, _ = serve("thinking", said)
        (choice,), _ = both(client, extra_body=more)
        assert (choice.message.reasoning, choice.message.content) == ("First <b>.", "Then.")


def test_thinking_can_be_turned_off(serve):
    for more in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        client, script = serve("thinking", "Then.</think>")
        (choice,), _ = both(client, extra_body=more)
        assert choice.message.content == "Then." and "reasoning" not in choice.message.model_extra
        assert script.prompts[0].endswith("<think>\n\n</think>\n\n")


def test_unfinished_reasoning_has_no_content(serve):
    client, _ = serve("thinking", "First")
    (choice,), _ = both(client)
    assert choice.message.content is None and choice.message.reasoning == "First" and choice.finish_reason == "stop"


def test_options_choose_dialect_and_reasoning(serve):
    client, _ = serve("unknown", "[THINK]Hm.[/THINK]" + XML, tool_dialect="qwen-xml", reasoning="mistral")
    (choice,), _ = both(client, tools=[TOOL])
    assert choice.message.reasoning == "Hm." and json.loads(choice.message.tool_calls[0].function.arguments) == CALLED
    client, _ = serve("thinking", "Hm.</think>x", reasoning="none")
    (choice,), _ = both(client)
    assert choice.message.content == "Hm.</think>x"


def test_a_call_that_the_token_limit_cuts_has_incomplete_arguments(serve):
    client, _ = serve("hermes", SAID["hermes"])
    (choice,), _ = both(client, tools=[TOOL], max_tokens=51)
    assert choice.finish_reason == "length" and choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Pa'


# The arguments of a call in the history, and what the template reads as the city.
SENT_BACK = [
    ('{"city": "Pa', "Pa"),
    ('{"city": "x", "days', "x"),
    ('{"city": "\\ud83d', "\ufffd"),  # the first half of an emoji
    ('{"city": "\\ud83d\\ude00"}', "\U0001f600"),
    ("{'city': 'x'}", "x"),
    ({"city": "x"}, "x"),
    ("no JSON", ""),
    ("[1]", ""),
    ("", ""),
    (None, ""),
]


@looped("arguments, city", SENT_BACK)
def test_a_conversation_with_a_cut_call_goes_on(serve, arguments, city):
    client, script = serve("hermes", "x")
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": [], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": []},
    ]
    both(client, messages=messages, tools=[TOOL])
    assert script.prompts[0].endswith(f"(called get_weather in {city})[tool](of get_weather)[assistant]")


DRAFT = "So: " + SAID["hermes"]

# What the model says behind its template's <think>, stop strings, and the reasoning and content of the answer.
STOPS = [
    ("one two</think>three four", ["two"], "one two", "three four"),
    ("one two</think>three two four", ["two"], "one two", "three "),
    ("one</think>two", ["</", "k>", "<"], "one", "two"),
    ("one\n\n</think>\n\ntwo\n\nthree", ["\n\n"], "one", "two"),
    ("one</think>a<think>two</think>b two c", ["two", "k"], "onetwo", "ab"),
    (DRAFT + "</think>a Paris b", ["Paris"], DRAFT, "a "),
    ("one</think>a <tool_ b", ["ol_ b"], "one", "a <to"),
]


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.full), pytest.param(90, marks=pytest.mark.full)])
def test_stop_strings_are_searched_in_the_content_alone(serve, size):
    for said, stops, reasoning, content in STOPS:
        client, _ = serve("thinking", said, sizes=(size,))
        (choice,), (own,) = both(client, tools=[TOOL], stop=stops, logprobs=True)
        assert (choice.message.reasoning, choice.message.content) == (reasoning, content), said
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None
        for entries in (choice.logprobs.content, own["logprobs"]):
            assert bytes(byte for entry in entries for byte in entry.bytes).decode() == content


def test_a_stop_string_in_the_content_ends_the_generation(serve):
    """A token is a byte, but each tag is one token; the stop string's last byte is the last token."""
    for said in ("two</think>one two", "two</think>" + SAID["hermes"] + "one two"):
        client, _ = serve("thinking", said + " and more")
        whole = client.chat.completions.create(
            **ASK, tools=[TOOL], stop=["two"], extra_body={"speculation": {"tokens": True}}
        )
        tags = sum(len(tag) - 1 for tag in ("</think>", "<tool_call>", "</tool_call>") if tag in said)
        assert whole.usage.completion_tokens == len(said) - tags
        assert "".join(token["text"] for token in whole.choices[0].speculation["tokens"]) == said.removesuffix("two")


def test_a_stop_string_never_cuts_a_call(serve):
    for name, text in SAID.items():
        client, _ = serve(name, "Yes." * (name != "llama-json") + text + " no.")
        (choice,), _ = both(client, tools=[TOOL], stop=["aris", "[", "<", "no."])
        assert choice.message.content == ("Yes." if name != "llama-json" else None), name
        assert choice.finish_reason == "tool_calls"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == CALLED


def test_a_call_that_the_model_leaves_open_is_closed(serve):
    for name, text in SAID.items():
        client, _ = serve(name, text[: text.index("Paris") + 5])
        (choice,), _ = both(client, tools=[TOOL])
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}


def test_a_call_in_the_reasoning_counts_only_if_the_reasoning_never_ends(serve):
    for said, reasoning, content, calls in (
        (DRAFT + "</think>\n\nok", DRAFT, "ok", 0),
        (DRAFT + " but no.\n</think>\n\nNo.", DRAFT + " but no.", "No.", 0),
        (DRAFT, "So:", None, 1),
        (DRAFT + "</think>a" + SAID["hermes"], DRAFT, "a", 1),
        ("Hm.</think>a<think>c</think></think>b", "Hm.c", "ab", 0),
    ):
        client, _ = serve("thinking", said, sizes=(4,))
        (choice,), _ = both(client, tools=[TOOL])
        assert (choice.message.reasoning, choice.message.content) == (reasoning, content), said
        assert len(choice.message.tool_calls or ()) == calls


def test_json_of_a_schema_keeps_tags_of_reasoning(serve):
    answer = '{"a": "<think>b</think>"}'
    client, _ = serve("thinking", "Hm.</think>" + answer)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    (choice,), _ = both(client, response_format=schema)
    assert (choice.message.reasoning, choice.message.content) == ("Hm.", answer)


@pytest.mark.parametrize("name", ["hermes", "plain"])
def test_earlier_calls_may_have_any_arguments(serve, name):
    for arguments, expected in (
        ('{"city": "Pa', {"city": "Pa"}),
        ('{"city": "Pa\nris"}', {"city": "Pa\nris"}),
        ({"city": "Pa"}, {"city": "Pa"}),
        ("", {}),
        (None, {}),
        ("null", {}),
        ("oops", {"arguments": "oops"}),
        ('["Pa"]', {"arguments": '["Pa"]'}),
        ('{"city": ' + "[" * 2000, {"arguments": '{"city": ' + "[" * 2000}),
    ):
        for content in ([], None, ""):
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            messages = [
                *ASK["messages"],
                {"role": "assistant", "content": content, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "x"},
            ]
            client, script = serve(name, "ok")
            client.chat.completions.create(**{**ASK, "max_tokens": 9, "messages": messages})
            written = f"(called f in {expected.get('city', '')})" if name == "hermes" else json.dumps(expected)
            assert written in script.prompts[0]


def test_each_of_several_answers_has_its_own_calls(serve):
    texts = ["plain", SAID["hermes"], "Hm." + SAID["hermes"] * 2]
    client, _ = serve("hermes", *texts, sizes=(5,))
    choices, _ = both(client, tools=[TOOL], n=3)
    assert [len(choice.message.tool_calls or ()) for choice in choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in choices] == ["stop", "tool_calls", "tool_calls"]
    ids = [call.id for choice in choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 3


def test_logprobs_are_those_of_the_content(serve):
    for sizes in ((1,), (9,)):
        client, _ = serve("thinking", "Hm.</think>\nA \u00e9 b. " + SAID["hermes"] + " \n c ", sizes=sizes)
        (choice,), (own,) = both(client, tools=[TOOL], logprobs=True)
        assert choice.message.content == "A \u00e9 b. c"
        for entries in (choice.logprobs.content, own["logprobs"]):
            assert bytes(byte for entry in entries for byte in entry.bytes).decode() == choice.message.content
    client, _ = serve("hermes", SAID["hermes"])
    (choice,), (own,) = both(client, tools=[TOOL], logprobs=True)
    assert choice.logprobs is None and own["logprobs"] == []


def test_the_tokens_of_an_answer_are_those_of_its_whole_text(serve):
    for name, text in (("hermes", "Yes. " + SAID["hermes"]), ("mistral-args", SAID["mistral-args"])):
        client, _ = serve(name, text, sizes=(4,))
        (choice,), (own,) = both(client, tools=[TOOL], extra_body={"speculation": {"tokens": True}})
        for tokens in (choice.speculation["tokens"], own["tokens"]):
            assert "".join(token["text"] for token in tokens) == text


def test_usage_counts_all_tokens(serve):
    client, _ = serve("hermes", SAID["hermes"])
    usage = client.chat.completions.create(**ASK, tools=[TOOL]).usage
    chunks = [*client.chat.completions.create(**ASK, tools=[TOOL], stream=True, stream_options={"include_usage": True})]
    # a token is a byte, but each tag is one token, and one ends the text
    assert usage.completion_tokens == chunks[-1].usage.completion_tokens == len(SAID["hermes"]) - 23 + 2 + 1
