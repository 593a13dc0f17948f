"""Log-probabilities as the two kinds of responses write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specengine.tokenizer import Tokenizer
from specengine.types import TokenLogprob


def chat_logprobs(
    entries: Sequence[tuple[int, TokenLogprob]], tokenizer: Tokenizer, num_top_logprobs: int
) -> dict[str, Any]:
    """Writes log-probabilities for /v1/chat/completions.  entries: (offset in the text, token) pairs."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": _finite(logprob), "bytes": [*data]}

    content = []
    for _, own in entries:
        top = [entry(token, logprob) for token, logprob in own.top[:num_top_logprobs]]
        content.append(entry(own.token_id, own.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[tuple[int, TokenLogprob]], tokenizer: Tokenizer, num_top_logprobs: int
) -> dict[str, Any]:
    """Writes log-probabilities for /v1/completions.  entries: (offset in the text, token) pairs.

    `top_logprobs` holds the most likely tokens and the generated one.
    """
    tops = [dict(own.top[:num_top_logprobs]) | {own.token_id: own.logprob} for _, own in entries]
    named = [{tokenizer.token_text(token): _finite(value) for token, value in top.items()} for top in tops]
    return {
        "tokens": [tokenizer.token_text(own.token_id) for _, own in entries],
        "token_logprobs": [_finite(own.logprob) for _, own in entries],
        "top_logprobs": named if num_top_logprobs else None,
        "text_offset": [offset for offset, _ in entries],
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity, so OpenAI writes this number for an impossible token."""
    return max(logprob, -9999.0)
