"""Tools, templates of every dialect, and what their models say. The fixture `serve` runs them with a script."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import openai

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
    "broken": "{% if %}",
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


@functools.cache
def model_of(name: str):
    return model_with(TEMPLATES[name], SPECIAL, PLAIN)


@contextlib.contextmanager
def scripted_servers() -> Iterator[Callable]:
    """Yields a function that sets what a model says, and returns a client of its server and the script."""
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
