"""Chat messages to prompt text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from specengine.tokenizer.template_child import environment
from specengine.tokenizer.template_process import TEMPLATES

LONGEST = 100_000  # characters of a template: the longest of known models have a quarter of it

# Vicuna's format has no BOS of its own (the tokenizer adds one); Llama-2's repeats BOS before each user turn.
CHAT_FORMATS: dict[str, str] = {
    "vicuna": """\
{%- if messages[0].role == 'system' %}{% set system, turns = messages[0].content, messages[1:] %}
{%- else %}{% set system = "A chat between a curious user and an artificial intelligence assistant. \
The assistant gives helpful, detailed, and polite answers to the user's questions." %}
{%- set turns = messages %}{% endif %}
{{- system + ' ' }}
{%- for message in turns %}
{%- if message.role == 'user' %}{{ 'USER: ' + message.content + ' ' }}
{%- elif message.role == 'assistant' %}{{ 'ASSISTANT: ' + message.content + '</s>' }}
{%- else %}{{ raise_exception('role must be user or assistant, or system in the first message') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}""",
    "llama-2": """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set turns = messages if system is none else messages[1:] %}
{%- for message in turns %}
{%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
{{- raise_exception('roles must alternate user, assistant, user, ... after an optional system message') }}
{%- endif %}
{%- if message.role == 'user' %}
{%- set content = message.content if system is none or not loop.first
    else '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message.content %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}""",
}


def format_for_name(name: str) -> str | None:
    """The built-in chat format of a model that ships no template, judged by its name."""
    name = name.lower().replace("_", "-")
    if "vicuna" in name:
        return "vicuna"
    if "chat" in name and ("llama-2" in name or "llama2" in name):
        return "llama-2"
    return None


def check_messages(messages: Any) -> list[dict[str, str]]:
    """Raises: ValueError naming `messages[i]` unless all are dicts of `role` and `content` strings."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a non-empty list of dicts with the keys 'role' and 'content'")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] must be a dict, got {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = type(message[key]).__name__ if key in message else "nothing"
                raise ValueError(f"messages[{index}][{key!r}] must be a string, got {found}")
    return [dict(message) for message in messages]


class ChatTemplate:
    """A Jinja chat template, run in a sandbox and in a process of its own because it comes with the model's files.

    source: the file or format it is from, for messages. special_tokens: variables such as `bos_token`.
    Raises: ValueError naming `source` for a syntax error, and for a template of no sensible length.
    """

    def __init__(self, template: str, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = {
            "bos_token": "",
            "eos_token": "",
            **(special_tokens or {}),
            "tools": None,
            "documents": None,
        }
        if len(template) > LONGEST:
            raise ValueError(f"{source}: chat template has {len(template)} characters, expected at most {LONGEST}")
        try:
            _parser().parse(template)  # only read here, never run
        except (jinja2.TemplateError, RecursionError) as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ValueError(f"{source}: chat template is not valid Jinja: {error}{line}") from None
        self._template = template

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation; ValueError if the messages or the template's own checks fail, and where
        the template takes more time or memory than any text is worth."""
        checked = check_messages(messages)
        variables = {"messages": checked, "add_generation_prompt": add_generation_prompt, **self._variables}
        try:
            text = TEMPLATES.render(self._template, variables)
            text.encode("utf-8")  # raises for half of a surrogate pair, of its own or of a message
            return text
        except ValueError as error:
            raise ValueError(f"{self.source}: chat template failed: {error}") from error


@lru_cache(maxsize=1)
def _parser() -> jinja2.Environment:
    return environment()
