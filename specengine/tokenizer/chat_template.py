"""Chat templates: they turn messages into the prompt text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.nodes

from specengine.tokenizer.final_message import cut_at_tag, tag_end
from specengine.tokenizer.template_child import environment
from specengine.tokenizer.template_process import TEMPLATES

LONGEST = 100_000  # characters of a template; the longest known template has a quarter of this

# The Vicuna format has no BOS, because the tokenizer adds it. The Llama-2 format repeats BOS before each user turn.
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
    """Returns the built-in chat format that the name of a model without a template implies, or None."""
    name = name.lower().replace("_", "-")
    if "vicuna" in name:
        return "vicuna"
    if "chat" in name and ("llama-2" in name or "llama2" in name):
        return "llama-2"
    return None


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns the messages as dicts.

    A message with `tool_calls` may lack its content, which is then empty. Templates may read further keys.
    Raises ValueError naming `messages[i]` unless every message is a mapping with strings `role` and `content`.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a non-empty list of dicts with the keys 'role' and 'content'")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] must be a dict, got {type(message).__name__}")
        message = dict(message)
        if message.get("tool_calls") and message.get("content") is None:
            message["content"] = ""
        checked.append(message)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = type(message[key]).__name__ if key in message else "nothing"
                raise ValueError(f"messages[{index}][{key!r}] must be a string, got {found}")
    return checked


class ChatTemplate:
    """A Jinja chat template. It comes with the model's files, so it runs in a sandbox in a separate process.

    text: the template.  reads: the names of the variables that it reads, and of some that it sets itself.
    source: its file or format, for error messages. special_tokens: variables such as `bos_token`.
    Raises ValueError naming `source` for a syntax error and for a template longer than LONGEST.
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
            parsed = _parser().parse(template)  # parsing runs nothing
            names = parsed.find_all(jinja2.nodes.Name)
            self.reads = frozenset(name.name for name in names if name.ctx == "load")
        except (jinja2.TemplateError, RecursionError) as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ValueError(f"{source}: chat template is not valid Jinja: {error}{line}") from None
        self.text = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the prompt text of a conversation.

        tools: functions as JSON schemas.  variables: further ones of the template, such as `enable_thinking`.
        continue_final_message: ends after the content of the last message; excludes add_generation_prompt.
        Raises ValueError if the messages are malformed, and one naming `source` if the template raises an error, gives
        an empty text, or exceeds the limits of time and memory.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message: excludes add_generation_prompt")
        checked = check_messages(messages)
        content = checked[-1]["content"]
        if continue_final_message:
            checked = tag_end(checked)
        own = {**self._variables, **(variables or {}), "tools": tools}
        variables = {**own, "messages": checked, "add_generation_prompt": add_generation_prompt}
        try:
            text = TEMPLATES.render(self.text, variables)
            if continue_final_message:
                text = cut_at_tag(text, content)
            text.encode("utf-8")  # raises for an unpaired surrogate of the template or of a message
        except ValueError as error:
            raise ValueError(f"{self.source}: chat template failed: {error}") from error
        if not text:
            raise ValueError(f"{self.source}: chat template gives an empty text for these messages")
        return text


@lru_cache(maxsize=1)
def _parser() -> jinja2.Environment:
    return environment()
