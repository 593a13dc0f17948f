"""What every kind of tokenizer file is read into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True)
class Vocabulary:
    """A backend with its special tokens and chat template, before any choice of the user.

    backend: encodes and holds the entries. source: the file, for messages. size: one more than the last id.
    add_bos, add_eos: whether text is framed by these tokens; None leaves it to the backend's post-processor.
    special_tokens: names such as `bos_token` with their text. chat_template: Jinja, from `template_source`.
    model_name: what the model is called, to choose a chat format when there is no template.
    """

    backend: tokenizers.Tokenizer
    source: str
    size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    template_source: str = ""
    model_name: str = ""


def chosen_template(templates: Sequence[tuple[str, str]], source: str) -> str | None:
    """The template named "default", or the only one; ValueError naming `source` if neither exists."""
    by_name = dict(templates)
    if not by_name:
        return None
    if "default" in by_name:
        return by_name["default"]
    if len(by_name) == 1:
        return next(iter(by_name.values()))
    raise ValueError(f"{source}: chat_template names {', '.join(by_name)} but none is 'default'")
