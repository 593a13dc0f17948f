"""The JSON of responses: choices, their envelope, usage and drafting statistics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specengine.server.logprobs import chat_logprobs, completion_logprobs
from specengine.types import GenerationOutput, SamplingParams
from specengine.utils.build_info import __version__


@dataclass(frozen=True)
class ResponseFormat:
    """The differences between responses of /v1/chat/completions and /v1/completions.

    object_name, chunk_name: `object` of a whole response and of a chunk.
    whole, delta: make the field of a choice from a text, and from an addition to it.
    opening: field of the first chunk, before any text; None: no such chunk.  closing: field of the last chunk.
    """

    id_prefix: str
    object_name: str
    chunk_name: str
    whole: Callable[[str], dict[str, Any]]
    delta: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None
    closing: dict[str, Any]
    logprobs: Callable[..., dict[str, Any]]


CHAT = ResponseFormat(
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    chunk_name="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    delta=lambda text: {"delta": {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
    closing={"delta": {}},
    logprobs=chat_logprobs,
)
COMPLETION = ResponseFormat(
    id_prefix="cmpl-",
    object_name="text_completion",
    chunk_name="text_completion",
    whole=lambda text: {"text": text},
    delta=lambda text: {"text": text},
    opening=None,
    closing={"text": ""},
    logprobs=completion_logprobs,
)


@dataclass
class Envelope:
    """The fields that all chunks of one response share."""

    format: ResponseFormat
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, object_name: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Makes a response or a chunk of one."""
        return {
            "id": self.format.id_prefix + self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"specengine-{__version__}",
            "choices": choices,
            **more,
        }


def make_choice(
    index: int,
    content: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    reason: str | None = None,
    speculation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Makes a choice, or the part of one in a chunk. An empty `speculation` is left out."""
    extra = {"speculation": speculation} if speculation else {}
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, **extra}


def api_finish_reason(output: GenerationOutput) -> str:
    """Returns the API's finish reason. It has none for a deadline, which is reported as `length`."""
    return "length" if output.finish_reason == "deadline" else output.finish_reason


def count_usage(outputs: Sequence[GenerationOutput], samples: int) -> dict[str, Any]:
    """Counts the tokens of a response with `samples` texts per prompt. Each prompt counts once."""
    prompts = outputs[::samples]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in prompts)
    completion_tokens = sum(len(output.token_ids) for output in outputs)
    cached = {"cached_tokens": sum(output.stats.prefix_hit_tokens for output in prompts)}
    return {**count_tokens(prompt_tokens, completion_tokens), "prompt_tokens_details": cached}


def count_tokens(prompt: int, completion: int) -> dict[str, Any]:
    """Returns the usage of a text."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def drafting_stats(
    output: GenerationOutput, drafter: str, rule: str, params: SamplingParams, sample: int
) -> dict[str, Any]:
    """Returns the drafting statistics of a text.  ended: the engine's finish reason, which may be `deadline`."""
    stats = output.stats
    return {
        "drafter": drafter,
        "rule": rule,
        "lossless": stats.lossless,
        "relaxed": stats.relaxed,
        "seed": params.seed + sample,
        "tokens": len(output.token_ids),
        "cycles": stats.cycles,
        "tau": stats.tau,
        "experts_per_layer": stats.experts_per_layer,
        "acceptance_by_depth": stats.acceptance_by_depth,
        "sources": {name: asdict(counts) for name, counts in stats.sources.items()},
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "ended": output.finish_reason,
    }
