"""OpenAI's client gets tool calls and reasoning, streamed and whole, in every dialect."""

import contextlib
import functools
import json

import llguidance
import openai
import pytest

from tests.server.scripted import model_with, scripted
from tests.server.servers import served

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "temperature": 0}
JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Paris \\u00e9", "days": 3}}'
CALLED = {"city": "Paris \u00e9", "days": 3}

MESSAGES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.reasoning_content %}(thought {{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}(called {{ c.function.name }} in {{ c.function.arguments.city }}){% endfor %}"
    "{% if m.role == 'tool' %}(of {{ m.name }}){% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = "{% for t in tools or [] %}[tool]{{ t | tojson }}{% endfor %}"
THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
TEMPLATES = {
    "hermes": TOOLS + '{# <tool_call> "arguments" #}' + MESSAGES,
    "qwen-xml": TOOLS + "{# <function=x> <parameter=x> <tool_call> #}" + MESSAGES,
    "llama-json": TOOLS + '{# <|start_header_id|> "parameters" #}' + MESSAGES,
    "mistral": TOOLS + "{# [TOOL_CALLS] #}" + MESSAGES,
    "mistral-args": TOOLS + "{# [TOOL_CALLS] [ARGS] #}" + MESSAGES,
    "thinking": TOOLS + '{# <tool_call> "arguments" </think> #}' + MESSAGES + THINKING,
    "plain": MESSAGES,
    "unknown": TOOLS + MESSAGES,
}
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")  # special tokens of some models, which decoding would skip
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis \u00e9\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
SAID = {
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "qwen-xml": XML,
    "llama-json": "<|python_tag|>" + JSON_CALL.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{JSON_CALL}]",
    "mistral-args": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris \u00e9", "days": 3}',
}


@pytest.fixture(scope="module")
def serve():
    """Returns a function that sets what a model says, and returns a client of its server and the script."""
    made: dict[tuple, openai.OpenAI] = {}
    with scripted() as script, contextlib.ExitStack() as stack:

        def start(name: str, *texts: str, sizes=(1,), **settings):
            key = (name, *settings.items())
            if key not in made:
                address = stack.enter_context(served(model_of(name), **settings))
                client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
                made[key] = stack.enter_context(client)
            script.texts, script.sizes = list(texts), sizes
            return made[key], script

        yield start


@functools.cache
def model_of(name: str):
    return model_with(TEMPLATES[name], SPECIAL, PLAIN)


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


@pytest.mark.parametrize("size", [1, 7])
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
        client, script = serve("thinking", "Then </think>.")
        (choice,), _ = both(client, extra_body=more)
        assert choice.message.content == "Then </think>." and "reasoning" not in choice.message.model_extra
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


def test_a_stop_string_within_a_call_ends_it(serve):
    client, _ = serve("hermes", "Yes." + SAID["hermes"])
    (choice,), _ = both(client, tools=[TOOL], stop=["aris"])
    assert choice.message.content == "Yes." and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "P'


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
        assert choice.message.content == "A \u00e9 b.  \n c"
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


STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
ANY = {"type": "function", "function": {"name": "any", "parameters": {"type": "object", "if": {}}}}
NAMED = {"type": "function", "function": {"name": "now"}}
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>'
WRONG = ONE.replace('"x"', "1")
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OBJECT = '{"city": "x"}'
FREE = "Just text."


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
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, [OBJECT, "{}"], ["[]", FREE]),
        ({"response_format": TOOL["function"]["parameters"]}, [OBJECT], ["{}", FREE]),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, [OBJECT, ONE, WRONG], [FREE]),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "none"}, [OBJECT], [ONE]),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "required"}, [ONE], [OBJECT]),
    ],
    ids=lambda value: str(value)[:70],
)
@pytest.mark.parametrize("name", ["hermes", "thinking"])
def test_a_request_constrains_its_answer(serve, name, asked, good, bad):
    if asked.get("response_format") is TOOL["function"]["parameters"]:
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


def accepts(name: str, params, text: str) -> bool:
    """Whether a text is of the language of a request's constraint, as the grammar engine reads the vocabulary."""
    grammar = llguidance.LLMatcher.grammar_from_lark(params.grammar) if params.grammar else None
    vocabulary = vocabulary_of(name)
    grammar = grammar or llguidance.LLMatcher.grammar_from_json_schema(json.dumps(params.json_schema))
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = model_of(name).tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@functools.cache
def vocabulary_of(name: str) -> llguidance.LLTokenizer:
    class Vocabulary:
        def __init__(self, tokenizer) -> None:
            self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
            self.special_token_ids = [*tokenizer.added_tokens]
            self.eos_token_id, self.bos_token_id = tokenizer.eos_token_ids[0], None

        def __call__(self, text: str) -> list[int]:
            return []

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary(model_of(name).tokenizer)))


def test_a_schema_and_free_calls_in_json_exclude_each_other(serve):
    client, _ = serve("llama-json", "x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, tools=[TOOL], response_format={"type": "json_object"})
    assert refused.value.param == "response_format"


CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
BAD_CALL = {**CALL, "function": {"name": "f", "arguments": "{"}}
ONLY_NAME = {"type": "json_schema", "json_schema": {"name": "x"}}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "text"}}}


def schema_format(schema: object, **more) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"tools": []}, "tools"),
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
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
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
        (schema_format({"type": "string", "format": "nonsense"}), "response_format.json_schema.schema"),
        (
            {"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA, "strict": True}}]},
            "tools[1].function.parameters",
        ),
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


def test_tools_of_an_unknown_dialect_are_refused(serve):
    client, _ = serve("unknown", "x")
    with pytest.raises(openai.BadRequestError, match="--tool-dialect") as refused:
        client.chat.completions.create(**ASK, tools=[TOOL])
    assert refused.value.param == "tools"
    client.chat.completions.create(**ASK)
