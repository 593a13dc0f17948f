"""The contents of a tokenizer file of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from specengine.tokenizer.chat_template import ChatTemplate


@dataclass(frozen=True)
class TemplateFile:
    """A chat template as its file has it.  problem: why there is no text."""

    source: str
    text: str | None
    problem: str = ""

    def compile(self, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Makes the template. Raises ValueError naming the file if there is no text or if it is not valid Jinja."""
        if self.text is None:
            raise ValueError(f"{self.source}: {self.problem}")
        return ChatTemplate(self.text, self.source, special_tokens)


@dataclass(frozen=True)
class Vocabulary:
    """A backend with its special tokens and chat template.

    backend: holds the entries and encodes. source: the file, for error messages. size: one more than the last id.
    add_bos, add_eos: whether these tokens frame a text; None leaves that to the backend's post-processor.
    special_tokens: texts by name, such as `bos_token`.
    model_name: selects a built-in chat format if there is no template.
    """

    backend: tokenizers.Tokenizer
    source: str
    size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: TemplateFile | None = None
    model_name: str = ""


def choose_template(templates: Mapping[str, Any], source: str) -> TemplateFile | None:
    """Returns the template named "default", or the only one; None without any.

    If there is no such template, or if it is no text, the result says so when a chat is rendered.
    """
    if not templates:
        return None
    text = templates.get("default", next(iter(templates.values())))
    if "default" not in templates and len(templates) > 1:
        return TemplateFile(source, None, f"chat_template names {', '.join(templates)} but none is 'default'")
    if not isinstance(text, str):
        return TemplateFile(source, None, f"chat_template must be a string or named strings, got {text!r:.80}")
    return TemplateFile(source, text)
