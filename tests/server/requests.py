"""Random bodies of requests: valid ones, and ones with damaged fields, values or bytes."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from tests.server.tools import NOW, TOOL

DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]
JUNK = (
    *(None, True, False, 0, 1, -1, 7, 5.0, 0.5, -0.0, 1e-5, 1e308, 2**31, 2**62, 2**63, -(2**63), 10**400),
    *(float("nan"), float("inf"), "", "x", "\ud83d", "\x00", "null", "5", "x" * 3000, "</think>", "<tool_call>"),
    *([], ["x"], [5], [None], [[]], ["x"] * 65, DEEP, {}, {"a": 1}, {"type": "text", "text": "x"}, {"": {}}),
)
SCHEMA = TOOL["function"]["parameters"]
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": [1]}'}}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
MESSAGES = (
    {"role": "system", "content": "Be kind."},
    {"role": "developer", "content": "Be brief.", "name": "boss"},
    {"role": "user", "content": "hello", "name": "ada"},
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "reasoning_content": "hm"},
    {"role": "assistant", "content": None, "refusal": "No."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"role": "tool", "content": "noon", "tool_call_id": "1"},
)
CALLING = 6  # the message that a tool answers
SHARED: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 2, 3, 4.0),
    "n": (1, 2, 3.0),
    "temperature": (0, 0.7, 1, 2, 1e-9),
    "top_p": (0, 0.5, 1),
    "top_k": (-1, 0, 3, 40.0),
    "min_p": (0, 0.1),
    "seed": (-1, 0, 5, 2**63 - 1, -(2**63)),
    "frequency_penalty": (-2, 0.5),
    "presence_penalty": (2, -0.5),
    "repetition_penalty": (0.5, 1.3),
    "logit_bias": ({"5": 100}, {"70": -100.0, "71": 1}, {}),
    "stop": ("a", ["a", "bc"], ["x"] * 64, []),
    "stream": (True, False),
    "ignore_eos": (True, False),
    "user": ("me",),
    "store": (True,),
    "metadata": ({"a": "b"},),
    "service_tier": ("flex",),
    "speculation": ({"off": True}, {"stats": True, "tokens": True}, {"max_nodes": 4}, {"drafter": "none"}, {}),
}
CHAT = {
    **SHARED,
    "logprobs": (True, False),
    "top_logprobs": (0, 2, 20.0),
    "max_completion_tokens": (1, 3),
    "tools": ([TOOL, NOW], [TOOL], []),
    "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "now"}}),
    "parallel_tool_calls": (True, False),
    "response_format": (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    ),
    "reasoning_effort": ("none", "low", "high"),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
}
COMPLETION = {
    **SHARED,
    "logprobs": (0, 2, 5.0),
    "echo": (False,),
    "suffix": ("",),
}


def random_request(seed: int) -> tuple[str, bytes]:
    """Makes the path and the body of a request."""
    random = Random(seed)
    chat = random.random() < 0.75
    known = CHAT if chat else COMPLETION
    body: dict[str, Any] = {
        name: random.choice(known[name]) for name in random.sample(sorted(known), random.randrange(7))
    }
    body |= {"model": "tiny", "max_tokens": body.get("max_tokens", 2)}
    if "max_completion_tokens" in body:
        del body["max_tokens"]
    if body.get("stream") and random.random() < 0.5:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": random.random() < 0.5}
    if chat:
        body["messages"] = [MESSAGES[CALLING], *random.choices(MESSAGES, k=random.randrange(4))]
        if body.keys() & {"tool_choice", "parallel_tool_calls"}:
            body["tools"] = [TOOL, NOW]
        if "top_logprobs" in body:
            body["logprobs"] = True
    else:
        body["best_of"] = body.get("n")
        body["prompt"] = random.choice(["ab", [5, 6], ["ab", "cd"], [[5], [6, 7]]])
    body = json.loads(json.dumps(body))  # a copy to damage
    for _ in range(random.choice((0, 0, 1, 1, 2, 4))):
        _damage(body, random, sorted(known))
    text = json.dumps(body, ensure_ascii=random.random() < 0.9).encode("utf-8", "surrogatepass")
    if random.random() < 0.05:
        at = random.randrange(len(text))
        text = text[:at] + random.randbytes(random.randrange(3)) + text[at + random.randrange(3) :]
    return ("/v1/chat/completions" if chat else "/v1/completions"), text


def _damage(body: Any, random: Random, names: list[str]) -> None:
    """Changes a value somewhere in a body."""
    places = [(body, name) for name in [*body, random.choice(names), random.choice(("other", "", "\ud83d", "n\n"))]]
    stack = list(body.values())
    while stack:
        value = stack.pop()
        if isinstance(value, dict | list) and value:
            keys = [*value] if isinstance(value, dict) else [*range(len(value))]
            places += [(value, key) for key in keys]
            stack += [value[key] for key in keys]
    holder, key = random.choice(places)
    if random.random() < 0.1 and isinstance(holder, dict):
        holder.pop(key, None)
    else:
        holder[key] = copy.deepcopy(random.choice(JUNK))
