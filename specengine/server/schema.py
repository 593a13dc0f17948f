"""What all requests of OpenAI's API that generate text share, and the requests of /v1/completions."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, model_validator

from specengine.server.body import Body, Unsupported
from specengine.server.constraint_fields import ConstrainedRequest
from specengine.server.fields import Count, Integer, LogitBias, Penalty, Prompts, Stop, make_error
from specengine.types import SamplingParams

T = TypeVar("T")

_NO_BEAMS = "this server samples"
GREEDY = 1e-4  # the reciprocal of a lower temperature overflows float32


class StreamOptions(Body):
    """include_usage: a last chunk has the usage.  continuous_usage_stats: then all others have it, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})  # this server has none to hide


class Speculation(Body):
    """Drafting, verification and their reports, for one request. The server's own settings are the defaults.

    drafter, rule: a spec that GET /v1/models lists.  max_nodes: size limit of a tree, root included.
    off: plain decoding.  stats: report the drafting statistics at the end.  tokens: report who proposed each token.
    """

    drafter: str | None = None
    rule: str | None = None
    max_nodes: Annotated[Integer | None, Field(ge=2, le=4096)] = None
    off: bool = False
    stats: bool = False
    tokens: bool = False

    @model_validator(mode="after")
    def _check(self) -> Speculation:
        if self.off and (self.drafter is not None or self.max_nodes is not None):
            raise make_error("off: excludes drafter and max_nodes")
        return self


class GenerationRequest(ConstrainedRequest):
    """The fields that chats and completions share.

    This server adds top_k, min_p, repetition_penalty, ignore_eos, min_tokens, stop_token_ids and skip_special_tokens,
    which mean the same as in SamplingParams, and speculation.
    """

    model: str
    frequency_penalty: Penalty = None
    logit_bias: LogitBias = None
    max_tokens: Count = None
    n: Annotated[Integer | None, Field(ge=1, le=128)] = None
    presence_penalty: Penalty = None
    seed: Annotated[Integer | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Stop = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None

    top_k: Annotated[Integer | None, Field(ge=-1, le=2**31 - 1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(ge=1e-3, le=1e3)] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[Integer | None, Field(ge=0, le=2**31 - 1)] = None
    stop_token_ids: list[Integer] | None = None
    skip_special_tokens: bool | None = None
    speculation: Speculation = Speculation()

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "cache_prompt",
            "metadata",
            "prediction",
            "priority",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "request_id",
            "safety_identifier",
            "service_tier",
            "session_id",
            "store",
            "user",
        }
    )
    unsupported: ClassVar[Unsupported] = {
        "bad_words": ("logit_bias excludes tokens", []),
        "echo": ("this server does not repeat the prompt", False),
        "include_stop_str_in_output": ("a stop string is not part of the text", False),
        "length_penalty": (_NO_BEAMS, 1, 1.0),
        "repeat_penalty": ("its name is repetition_penalty", 1, 1.0),
        "return_token_ids": ("answers have no token ids", False),
        "return_tokens_as_token_ids": ("answers have no token ids", False),
        "use_beam_search": (_NO_BEAMS, False),
    }
    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None] = None  # None: the rest of the context

    @model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise make_error("stream_options: needs stream: true")
        return self

    @property
    def prompts(self) -> list[Any]:
        """The prompts as the engine takes them."""
        raise NotImplementedError

    @property
    def samples(self) -> int:
        """Number of texts per prompt."""
        return self.n or 1

    @property
    def requested_tokens(self) -> int | None:
        """The token limit in the request, or None."""
        return self.max_tokens

    @property
    def requested_tokens_field(self) -> str:
        """The field that holds the token limit."""
        return "max_tokens"

    @property
    def constraint_field(self) -> str | None:
        """The field that constrains the text, or None."""
        return self.constraint.field if self.constraint else None

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to report beside each token; None: no log-probabilities."""
        raise NotImplementedError

    def make_params(self, max_new_tokens: int, **more: Any) -> SamplingParams:
        """Makes the engine's parameters. Raises ValueError naming a parameter that the engine does not accept."""
        temperature = _or_default(self.temperature, 1.0)
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if temperature < GREEDY else temperature,
            top_k=max(_or_default(self.top_k, 0), 0),
            # 0 keeps only the most likely token, as does the smallest top_p that the engine accepts.
            top_p=max(_or_default(self.top_p, 1.0), 1e-6),
            min_p=_or_default(self.min_p, 0.0),
            repetition_penalty=_or_default(self.repetition_penalty, 1.0),
            presence_penalty=_or_default(self.presence_penalty, 0.0),
            frequency_penalty=_or_default(self.frequency_penalty, 0.0),
            logit_bias=self.logit_bias,
            seed=self._make_seed(),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            stop_token_ids=self.stop_token_ids or (),
            logprobs=0 if self.num_top_logprobs is None else max(1, self.num_top_logprobs),
            n=self.samples,
            trace=self.speculation.tokens,
            **{"stop": self.stop, **more},
        )

    def _make_seed(self) -> int:
        """Returns the seed of the first sample. The engine has none below zero."""
        seed = secrets.randbits(53) if self.seed is None else self.seed
        return min(seed if seed >= 0 else ~seed, 2**63 - self.samples)


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    logprobs: Annotated[Integer | None, Field(ge=0, le=5)] = None
    best_of: Annotated[Integer | None, Field(ge=1, le=128)] = None

    unsupported: ClassVar[Unsupported] = {
        **GenerationRequest.unsupported,
        "suffix": ("the model continues texts and does not fill gaps", ""),
    }
    prompt_field: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = 16

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.best_of not in (None, self.samples):
            raise make_error("best_of: must equal n, because this server does not rank texts")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        return self.prompt


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value
