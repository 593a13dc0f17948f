"""Requests as OpenAI documents them, and what the engine is asked for. Unknown fields are refused by name."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specengine.server.errors import ApiError
from specengine.server.fields import Biases, Count, Penalty, Prompts, Stop, Text, wrong
from specengine.types import SamplingParams

_CALLS = "this server calls no tools or functions"
_TEXT = "this server reads and writes plain text"
_STORE = "this server stores nothing"

Refused = Mapping[str, tuple[Any, ...]]  # field -> why, then the values that ask for nothing, besides null


class _Body(BaseModel):
    """A field that is null is as good as absent.  refused: fields that the API has and this server has not."""

    model_config = ConfigDict(extra="forbid", strict=True)
    refused: ClassVar[Refused] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, (why, *neutral) in cls.refused.items():
            value = body.get(name)
            # 0 and False are equal, and not the same thing to ask for.
            if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
                raise wrong(f"{name}: is not supported: {why}")
        absent = {name for name in cls.model_fields if body.get(name) is None}
        return {name: value for name, value in body.items() if name not in cls.refused and name not in absent}


class StreamOptions(_Body):
    include_usage: bool | None = None

    refused: ClassVar[Refused] = {"include_obfuscation": ("streams are not padded", False)}


class Speculation(_Body):
    """How tokens are drafted and verified, and what is told of it; what is left out is as the server was started.

    drafter, rule: one of those that GET /v1/models lists.  max_nodes: of a tree, at most, its root included.
    off: plain decoding.  stats: what drafting came to, with the last part of the text.  tokens: who proposed each.
    """

    drafter: str | None = None
    rule: str | None = None
    max_nodes: Annotated[int | None, Field(ge=2, le=4096)] = None
    off: bool = False
    stats: bool = False
    tokens: bool = False

    @model_validator(mode="after")
    def _check(self) -> Speculation:
        if self.off and (self.drafter is not None or self.max_nodes is not None):
            raise wrong("off: goes with neither drafter nor max_nodes")
        return self


class Request(_Body):
    """What both kinds of request have. top_k, min_p, repetition_penalty and ignore_eos are ours, as SamplingParams."""

    model: str
    frequency_penalty: Penalty = None
    logit_bias: Biases = None
    max_tokens: Count = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    presence_penalty: Penalty = None
    seed: Annotated[int | None, Field(ge=0, lt=2**62)] = None
    stop: Stop = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    user: str | None = None

    top_k: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(ge=1e-3, le=1e3)] = None
    ignore_eos: bool | None = None
    speculation: Speculation = Speculation()

    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int | None] = None  # where the request says nothing of it; None: the rest of the context

    @model_validator(mode="after")
    def _check(self) -> Request:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options: is for streams alone (stream: true)")
        return self

    @property
    def prompts(self) -> list[Any]:
        """As the engine takes them."""
        raise NotImplementedError

    @property
    def asked_tokens(self) -> int | None:
        """Tokens of a text, at most, where the request says so."""
        return self.max_tokens

    @property
    def asked_field(self) -> str:
        """Where it says so."""
        return "max_tokens"

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are reported beside each; None: no log-probabilities."""
        raise NotImplementedError

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Raises ValueError naming a parameter that the engine cannot honour."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=_or(self.temperature, 1.0),
            top_k=_or(self.top_k, 0),
            # 0 leaves the most likely token, as the smallest share does that the engine knows.
            top_p=max(_or(self.top_p, 1.0), 1e-6),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=self.logit_bias,
            seed=secrets.randbits(53) if self.seed is None else self.seed,
            stop=self.stop,
            ignore_eos=bool(self.ignore_eos),
            logprobs=0 if self.likeliest is None else max(1, self.likeliest),
            n=self.n or 1,
            trace=self.speculation.tokens,
        )


class Message(_Body):
    role: Literal["developer", "system", "user", "assistant"]
    content: Text

    refused: ClassVar[Refused] = {
        "name": ("chat templates have no names of participants",),
        "annotations": (_TEXT, []),
        "audio": (_TEXT,),
        "function_call": (_CALLS,),
        "refusal": (_TEXT,),
        "tool_calls": (_CALLS, []),
    }

    @model_validator(mode="before")
    @classmethod
    def _known_role(cls, message: Any) -> Any:
        if isinstance(message, dict) and message.get("role") in ("tool", "function"):
            raise wrong(f"role {message['role']!r} is not supported: {_CALLS}")
        return message

    @property
    def turn(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role  # the newer name of the same thing
        return {"role": role, "content": self.content}


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    max_completion_tokens: Count = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    refused: ClassVar[Refused] = {
        "audio": (_TEXT,),
        "function_call": (_CALLS, "none"),
        "functions": (_CALLS,),
        "metadata": (_STORE,),
        "modalities": (_TEXT, ["text"]),
        "moderation": ("this server judges no text",),
        "parallel_tool_calls": (_CALLS, False),
        "prediction": ("drafters are chosen by speculation.drafter",),
        "prompt_cache_options": (_STORE,),
        "prompt_cache_retention": (_STORE, "in_memory"),
        "reasoning_effort": ("the model answers at once", "none"),
        "response_format": (_TEXT, {"type": "text"}),
        "service_tier": ("all requests are served alike", "auto", "default"),
        "store": (_STORE, False),
        "tool_choice": (_CALLS, "none"),
        "tools": (_CALLS,),
        "verbosity": ("the model is asked for it in words", "medium"),
        "web_search_options": (_CALLS,),
    }
    prompt_field: ClassVar[str] = "messages"

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs: needs logprobs: true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise wrong("max_tokens: is the older name of max_completion_tokens, and says something else here")
        return self

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def asked_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[Any]:
        return [[message.turn for message in self.messages]]


class CompletionRequest(Request):
    prompt: Prompts
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    best_of: Annotated[int | None, Field(ge=1, le=128)] = None

    refused: ClassVar[Refused] = {
        "echo": ("the prompt is not repeated", False),
        "suffix": ("the model continues texts and fills no gaps", ""),
    }
    prompt_field: ClassVar[str] = "prompt"
    default_tokens: ClassVar[int | None] = 16

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise wrong("best_of: is not supported: texts are not ranked; it may be n")
        return self

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        return self.prompt


def invalid(errors: list[Any]) -> ApiError:
    """The first of pydantic's errors, with the field's path."""
    first = errors[0]
    path = [part for part in first["loc"] if part != "body"]
    message = first["msg"]
    if first["type"] == "json_invalid":
        return ApiError(400, "body: is not JSON", code="json_invalid")
    if first["type"] == "extra_forbidden":
        message = "is not a field of this API"
    if first["type"] == "request" and (named := re.match(r"(\w+): ", message)):  # an error of several fields
        path, message = [*path, named[1]], message[named.end() :]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return ApiError(400, f"{field or 'body'}: {message}", param=field or None, code=first["type"])


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
