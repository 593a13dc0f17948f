"""The contents of a tokenizer file of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True)
class Vocabulary:
    """A backend with its special tokens and chat template.

    backend: holds the entries and encodes. source: the file, for error messages. size: one more than the last id.
    add_bos, add_eos: whether these tokens frame a text; None leaves that to the backend's post-processor.
    special_tokens: texts by name, such as `bos_token`. chat_template: Jinja, from `template_source`.
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
    chat_template: str | None = None
    template_source: str = ""
    model_name: str = ""


def choose_template(templates: Sequence[tuple[str, str]], source: str) -> str | None:
    """Returns the template named "default", or the only one; None without any.

    Raises ValueError naming `source` if several exist and none is the default.
    """
    by_name = dict(templates)
    if not by_name:
        return None
    if "default" in by_name:
        return by_name["default"]
    if len(by_name) == 1:
        return next(iter(by_name.values()))
    raise ValueError(f"{source}: chat_template names {', '.join(by_name)} but none is 'default'")
