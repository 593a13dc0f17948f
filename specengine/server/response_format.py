"""How the two kinds of texts are written: choices, parts of choices, usage, statistics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

from specengine.server.token_attribution import logprobs_of_chat, logprobs_of_completion
from specengine.types import GenerationOutput, SamplingParams
from specengine.utils.build_info import __version__


@dataclass(frozen=True)
class Form:
    """Of /v1/chat/completions or /v1/completions.

    whole, part: a text, or what is added to it, as the field of a choice.  opening: what the first part has before any
    text; None: nothing.  closing: what the last part has.
    """

    prefix: str
    whole_object: str
    part_object: str
    whole: Callable[[str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None
    closing: dict[str, Any]
    logprobs: Callable[..., dict[str, Any]]


CHAT = Form(
    prefix="chatcmpl-",
    whole_object="chat.completion",
    part_object="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    part=lambda text: {"delta": {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
    closing={"delta": {}},
    logprobs=logprobs_of_chat,
)
COMPLETION = Form(
    prefix="cmpl-",
    whole_object="text_completion",
    part_object="text_completion",
    whole=lambda text: {"text": text},
    part=lambda text: {"text": text},
    opening=None,
    closing={"text": ""},
    logprobs=logprobs_of_completion,
)


@dataclass
class Envelope:
    """What every part of one answer has."""

    form: Form
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def __call__(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.form.prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"specengine-{__version__}",
            "choices": choices,
            **more,
        }


def choice(
    index: int,
    content: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    reason: str | None = None,
    speculation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A choice, or a part of one; the field `speculation` is there where there is anything in it."""
    extra = {"speculation": speculation} if speculation else {}
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, **extra}


def finish_reason(output: GenerationOutput) -> str:
    """In the API's words, which have none for a deadline: it is a limit on the length like others."""
    return "length" if output.finish_reason == "deadline" else output.finish_reason


def usage(outputs: Seq[GenerationOutput], samples: int) -> dict[str, Any]:
    """Tokens of an answer whose prompts have so many samples each; a prompt counts once."""
    prompts = outputs[::samples]
    asked = sum(len(output.prompt_token_ids) for output in prompts)
    said = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": asked,
        "completion_tokens": said,
        "total_tokens": asked + said,
        "prompt_tokens_details": {"cached_tokens": sum(output.stats.prefix_hit_tokens for output in prompts)},
    }


def statistics(
    output: GenerationOutput, drafter: str, rule: str, params: SamplingParams, sample: int
) -> dict[str, Any]:
    """What drafting came to.  ended: why the text ended, `deadline` included."""
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
        "acceptance_by_depth": stats.acceptance_by_depth,
        "sources": _sources(stats.sources.items()),
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "ended": output.finish_reason,
    }


def _sources(sources: Iterable[tuple[str, Any]]) -> dict[str, dict[str, int]]:
    return {name: asdict(counts) for name, counts in sources}
