"""OpenAI's client gets the engine's texts from the server, and errors that name the field at fault."""

import asyncio

import openai
import pytest

from specengine import SamplingParams
from tests.server.servers import HELLO, chat_folder, command, plain_engine

DRAFTER = "prompt_lookup,adaptive=false"
PROMPT = "ab ab ab ab"

LETTERS = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 5, "maxItems": 9}

# Fields of a request, and the same parameters for the engine.
REQUESTS = {
    "greedy": ({"temperature": 0}, {"temperature": 0}),
    "sampled": ({"temperature": 0.8, "top_p": 0.9, "seed": 5}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}),
    "as documented where nothing is said": ({"seed": 3}, {"temperature": 1.0, "seed": 3}),
    "penalties": (
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "seed": 9},
        {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": -0.5, "seed": 9},
    ),
    "bias": (
        {"logit_bias": {"70": 100, "71": 99.5}, "seed": 1},
        {"temperature": 1.0, "logit_bias": {70: 100, 71: 99.5}, "seed": 1},
    ),
    "stop": ({"temperature": 0, "stop": ["ho", "@"]}, {"stop": ["ho", "@"]}),
    "our own": (
        {"seed": 2, "extra_body": {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True}},
        {"temperature": 1.0, "seed": 2, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True},
    ),
    "least tokens and stop tokens": (
        {"seed": 6, "logit_bias": {"2": 30}, "extra_body": {"min_tokens": 21, "stop_token_ids": [70, 71]}},
        {"temperature": 1.0, "seed": 6, "logit_bias": {2: 30}, "min_tokens": 21, "stop_token_ids": [70, 71]},
    ),
    "special tokens": (
        {"seed": 6, "logit_bias": {"0": 5, "1": 5}, "extra_body": {"skip_special_tokens": False}},
        {"temperature": 1.0, "seed": 6, "logit_bias": {0: 5, 1: 5}, "skip_special_tokens": False},
    ),
    "a regex": (
        {"seed": 2, "extra_body": {"structured_outputs": {"regex": "[a-f]{9,20}x"}}},
        {"temperature": 1.0, "seed": 2, "regex": "[a-f]{9,20}x"},
    ),
    "a grammar": (
        {"seed": 2, "extra_body": {"grammar": 'root ::= [a-f] root | "."', "min_tokens": 9}},
        {"temperature": 1.0, "seed": 2, "grammar": 'root ::= [a-f] root | "."', "min_tokens": 9},
    ),
    "a schema": (
        {"seed": 2, "extra_body": {"response_format": {"type": "json_object", "schema": LETTERS}}},
        {"temperature": 1.0, "seed": 2, "json_schema": LETTERS},
    ),
    "several": ({"n": 3, "seed": 4}, {"temperature": 1.0, "seed": 4, "n": 3}),
}


@pytest.fixture(scope="module")
def address():
    options = ("--model", str(chat_folder()), "--drafter", DRAFTER, "--device", "cpu", "--max-new-tokens", "450")
    with command(*options) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
        yield client


def said(prompt, tokens: int, params: dict):
    """Returns the engine's own outputs as a list."""
    outputs = plain_engine().generate(prompt, SamplingParams(max_new_tokens=tokens, **params))
    return outputs if isinstance(outputs, list) else [outputs]


def texts_of(chunks) -> tuple[list[str], list[str], list]:
    """Returns the texts, the finish reasons and the chunks of a chat's stream."""
    chunks = [*chunks]
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in reasons, "something follows the end"
            if choice.delta.role:
                assert choice.delta.role == "assistant" and choice.index not in texts
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return [texts[i] for i in sorted(texts)], [reasons[i] for i in sorted(reasons)], chunks


@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=REQUESTS)
def test_a_chat_says_what_the_engine_says_whole_and_as_a_stream(client, request_of):
    asked, params = request_of
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 40, **asked}
    outputs = said(HELLO, 40, params)
    whole = client.chat.completions.create(**body)
    assert [c.message.content for c in whole.choices] == [o.text for o in outputs]
    assert [c.finish_reason for c in whole.choices] == [o.finish_reason for o in outputs]
    assert whole.object == "chat.completion" and whole.model == "tiny" and whole.system_fingerprint
    count = sum(len(o.token_ids) for o in outputs)
    prompt = len(outputs[0].prompt_token_ids)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (prompt, count)
    assert whole.usage.total_tokens == prompt + count

    texts, reasons, chunks = texts_of(
        client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    assert (texts, reasons) == ([o.text for o in outputs], [o.finish_reason for o in outputs])
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    assert all(chunk.usage is None for chunk in chunks[:-1]) and not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == count
    assert len(chunks) > 5, "it came at once"


@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=REQUESTS)
def test_a_completion_says_what_the_engine_says_whole_and_as_a_stream(client, request_of):
    asked, params = request_of
    prompts = [PROMPT, plain_engine().tokenizer.encode("cd cd cd")]
    body = {"model": "tiny", "prompt": prompts[0], "max_tokens": 30, **asked}
    outputs = said(prompts[0], 30, params)
    whole = client.completions.create(**body)
    assert [c.text for c in whole.choices] == [o.text for o in outputs] and whole.object == "text_completion"

    both = [output for prompt in prompts for output in said(prompt, 30, params)]
    as_ids = [plain_engine().tokenizer.encode(PROMPT), prompts[1]]
    texts, reasons = [""] * len(both), [None] * len(both)
    for chunk in client.completions.create(**body | {"prompt": as_ids}, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert (texts, reasons) == ([o.text for o in both], [o.finish_reason for o in both])


def test_a_completion_has_sixteen_tokens_and_a_chat_what_the_server_allows(client):
    short = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert short.usage.completion_tokens == 16 and short.choices[0].finish_reason == "length"
    long = client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"ignore_eos": True})
    assert long.usage.completion_tokens == 450


def test_chats_have_roles_and_parts(client):
    turns = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "annotations": []},
        {"role": "user", "content": "more"},
    ]
    same = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=turns, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content == said(same, 20, {})[0].text
    again = [*turns, answer.choices[0].message, {"role": "user", "content": "on"}]  # an object of the client library
    client.chat.completions.create(model="tiny", messages=again, max_tokens=2)


def test_logprobs_of_a_chat_are_the_engines_and_stand_beside_their_text(client):
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "seed": 3, "logprobs": True, "top_logprobs": 3}
    (output,) = said(HELLO, 30, {"temperature": 1.0, "seed": 3, "logprobs": 3})
    whole = client.chat.completions.create(**body).choices[0].logprobs.content
    streamed = []
    for chunk in client.chat.completions.create(**body, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == whole and len(whole) >= len(output.token_ids) - 1
    for entry, own in zip(whole, output.logprobs, strict=False):
        assert entry.logprob == own.logprob
        assert [top.logprob for top in entry.top_logprobs] == [value for _, value in own.top]
        assert bytes(entry.bytes) == plain_engine().tokenizer.token_bytes(own.token_id)
    assert bytes(b for entry in whole for b in entry.bytes).decode(errors="replace") == output.text
    none = client.chat.completions.create(**body | {"logprobs": True, "top_logprobs": None})
    assert all(entry.top_logprobs == [] for entry in none.choices[0].logprobs.content)


def test_logprobs_of_a_completion_have_places_in_the_text(client):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "seed": 8}
    answer = client.completions.create(**body, logprobs=2).choices[0]
    (output,) = said(PROMPT, 20, {"temperature": 1.0, "seed": 8, "logprobs": 2})
    found = answer.logprobs
    assert found.token_logprobs == [own.logprob for own in output.logprobs][: len(found.tokens)]
    assert found.text_offset == sorted(found.text_offset) and found.text_offset[-1] < len(answer.text)
    assert all(2 <= len(top) <= 3 or "\ufffd" in "".join(top) for top in found.top_logprobs)
    assert client.completions.create(**body, logprobs=0).choices[0].logprobs.top_logprobs is None


def test_no_logprobs_follow_a_stop_string(client):
    text = said(HELLO, 40, {})[0].text
    stop = text[12:14]
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 0, "stop": stop, "logprobs": True}
    answer = client.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content == text[: text.index(stop)]
    told = bytes(b for entry in answer.logprobs.content for b in entry.bytes).decode(errors="replace")
    assert told.startswith(answer.message.content) and stop not in told


def test_statistics_and_who_proposed_what_are_told_on_request(client):
    ask = {"speculation": {"stats": True, "tokens": True}}
    body = {"model": "tiny", "prompt": "abcabcabcabcabcabc", "max_tokens": 60, "temperature": 0, "extra_body": ask}
    texts, by, cycles, stats = "", [], [], None
    for chunk in client.completions.create(**body, stream=True):
        told = getattr(chunk.choices[0], "speculation", None) or {}
        texts += "".join(token["text"] for token in told.get("tokens", []))
        by += [token["by"] for token in told.get("tokens", [])]
        cycles += told.get("cycles", [])
        stats = told.get("stats", stats)
    whole = client.completions.create(**body).choices[0]
    assert texts == whole.text and stats["tokens"] == 60 and stats["drafter"] == DRAFTER and stats["lossless"]
    assert {"prompt_lookup", "bonus"} <= set(by) <= {"prompt_lookup", "bonus", "root"}
    assert len(cycles) == stats["cycles"] and sum(cycle["accepted"] for cycle in cycles) + len(cycles) in (60, 61)
    assert stats["tau"] == 60 / len(cycles) and stats["ended"] == "length" and stats["seed"] >= 0
    assert "".join(token["text"] for token in whole.speculation["tokens"]) == whole.text
    plain = client.completions.create(**{k: v for k, v in body.items() if k != "extra_body"})
    assert not hasattr(plain.choices[0], "speculation") and plain.choices[0].text == whole.text


def test_the_seed_that_was_drawn_gives_the_text_again(client):
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 30}
    first = client.chat.completions.create(**body, extra_body={"speculation": {"stats": True}}).choices[0]
    seed = first.speculation["stats"]["seed"]
    again = client.chat.completions.create(**body, seed=seed).choices[0]
    assert again.message.content == first.message.content
    others = {client.chat.completions.create(**body).choices[0].message.content for _ in range(3)}
    assert len(others) > 1


@pytest.mark.parametrize(
    "speculation",
    [{"off": True}, {"drafter": "none"}, {"drafter": "prompt_lookup"}, {"max_nodes": 4}, {"rule": "match"}],
)
def test_drafting_is_chosen_by_request_and_changes_no_text(client, speculation):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=40, seed=6, extra_body={"speculation": speculation | {"stats": True}}
    ).choices[0]
    assert answer.message.content == said(HELLO, 40, {"temperature": 1.0, "seed": 6})[0].text
    drafter = answer.speculation["stats"]["drafter"]
    assert drafter == {"off": "none", "max_nodes": f"{DRAFTER},nodes=4"}.get(
        next(iter(speculation)), speculation.get("drafter", DRAFTER)
    )


def test_another_rule_is_used(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=20,
        seed=6,
        extra_body={"speculation": {"rule": "rejection", "drafter": "none", "stats": True}},
    )
    assert answer.choices[0].speculation["stats"]["rule"] == "rejection"


def test_async_clients_are_answered_side_by_side(address):
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=HELLO, max_tokens=60, seed=seed, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(8)))

    texts = asyncio.run(main())
    assert texts == [said(HELLO, 60, {"temperature": 1.0, "seed": seed})[0].text for seed in range(8)]


def test_a_client_finds_the_model(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.object == "model" and model.speculation["drafters"][0] == DRAFTER
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-4")
    assert refused.value.code == "model_not_found"


PICTURE = [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "weather"}]}, "functions"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"verbosity": "low"}, "verbosity"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": PICTURE}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "refusal": "No."}]}, "messages[0].refusal"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "messages[0].content"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO * 60}, "messages"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1e-6}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 300}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 451}, "max_tokens"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 451}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 600}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": ""}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"500": 1}}, "logit_bias"),
        ({"extra_body": {"stop_token_ids": [500]}}, "stop_token_ids"),
        ({"extra_body": {"continue_final_message": True, "add_generation_prompt": True}}, "continue_final_message"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"best_off": 2}}, "best_off"),
        ({"extra_body": {"speculation": {"drafter": "medusa:/etc"}}}, "speculation.drafter"),
        ({"extra_body": {"speculation": {"rule": "margin"}}}, "speculation.rule"),
        ({"extra_body": {"speculation": {"drafter": "none", "max_nodes": 4}}}, "speculation.max_nodes"),
        ({"extra_body": {"speculation": {"max_nodes": 1}}}, "speculation.max_nodes"),
        ({"extra_body": {"speculation": {"off": True, "drafter": "none"}}}, "speculation.off"),
        ({"extra_body": {"speculation": {"of": True}}}, "speculation.of"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_a_chat_cannot_have_is_refused_by_name(client, asked, field):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 5, **asked})
    assert refused.value.param == field and field.split("[")[0].split(".")[0] in refused.value.message
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5, 999]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"extra_body": {"messages": []}}, "messages"),
    ],
    ids=str,
)
def test_what_a_completion_cannot_have_is_refused_by_name(client, asked, field):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": "tiny", "prompt": "x", "max_tokens": 5, **asked})
    assert refused.value.param == field


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert refused.value.code == "model_not_found" and refused.value.param == "model"


def test_a_prompt_longer_than_the_context_says_so_in_the_apis_code(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("speculation", [None, {"off": None, "stats": None, "tokens": None, "max_nodes": None}])
def test_what_asks_for_nothing_is_accepted(client, speculation):
    client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=2,
        user="me",
        store=False,
        tool_choice="none",
        parallel_tool_calls=False,
        response_format={"type": "text"},
        service_tier="auto",
        modalities=["text"],
        top_p=0,
        stop=None,
        prompt_cache_key="x",
        stream=False,
        extra_body={"speculation": speculation},
    )
