"""Turns prompts into token ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specengine.models.config import ModelConfig
from specengine.tokenizer import Tokenizer
from specengine.types import Prompt, PromptTooLong


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """Returns the prompts as a list, and whether the caller gave a single one (a string, ids, or messages)."""
    if isinstance(prompts, np.ndarray) and prompts.ndim == 0:
        prompts = prompts.item()
    if isinstance(prompts, str) or (_is_list(prompts) and len(prompts) and _is_element(prompts[0])):
        return [prompts], True
    if not _is_list(prompts):
        raise ValueError(
            "prompts: expected a string, a list of token ids, a list of chat messages, or a list of those, "
            f"got {type(prompts).__name__}"
        )
    return list(prompts), False


def prompt_size(prompts: Any) -> float:
    """Returns how many characters or token ids prompts have; infinity for chats, whose template may take long."""
    if isinstance(prompts, str):
        return len(prompts)
    if not _is_list(prompts) or not len(prompts):
        return 0
    if isinstance(prompts[0], Mapping):
        return math.inf
    return len(prompts) if _is_element(prompts[0]) else sum(map(prompt_size, prompts))


def encode_prompt(
    prompt: Any, tokenizer: Tokenizer | None, config: ModelConfig, template_arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """Returns the token ids of one prompt. Raises ValueError for an empty, too long or malformed one.

    template_arguments: `tools` and `variables` for the chat template, as in Tokenizer.encode_chat.
    """
    if _is_list(prompt) and all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in prompt):
        ids = [int(token) for token in prompt]
    elif isinstance(prompt, str):
        _check_text("prompt", prompt)
        ids = _tokenizer(tokenizer).encode(prompt)
    elif _is_list(prompt) and all(isinstance(message, Mapping) for message in prompt):
        for i, message in enumerate(prompt):
            _check_text(f"prompt: messages[{i}]", message.get("content"))
        ids = _tokenizer(tokenizer).encode_chat(list(prompt), **(template_arguments or {}))
    else:
        raise ValueError(
            "prompt: expected a string, a list of token ids (integers) or a list of chat messages, "
            f"got {str(prompt)[:80]!r}"
        )
    if not ids:
        raise ValueError("prompt: is empty (it has no tokens to continue)")
    wrong = next((token for token in ids if not 0 <= token < config.vocab_size), None)
    if wrong is not None:
        text = tokenizer.token_text(wrong) if tokenizer is not None and wrong >= 0 else ""
        named = f"{wrong} ({text!r})" if text else f"{wrong}"
        raise ValueError(f"prompt: token id {named} is not in 0 to {config.vocab_size - 1}")
    if len(ids) >= config.max_position:
        raise PromptTooLong(
            f"prompt: has {len(ids)} tokens; the prompt is too long, because this model's maximum context length is "
            f"{config.max_position} tokens and one more must fit"
        )
    return ids


def _check_text(name: str, text: Any) -> None:
    """Refuses unpaired surrogates, which a shell or a file with another encoding leaves in a string."""
    try:
        if isinstance(text, str):
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: is not valid UTF-8 text at character {error.start}") from error


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError("prompt: this model has no tokenizer; give a list of token ids")
    return tokenizer


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_element(value: Any) -> bool:
    return isinstance(value, int | np.integer | Mapping)
