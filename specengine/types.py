"""What users pass and get: parameters, outputs, statistics, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from specengine.utils.parameter_checks import check_integer, check_number, check_text, shown

Message = Mapping[str, Any]  # role and content; tool_calls and others where a chat template reads them
Prompt = str | Sequence[int] | Sequence[Message]

_INTEGERS = (
    ("max_new_tokens", 1, 2**31 - 1),
    ("top_k", 0, 2**31 - 1),
    ("seed", 0, 2**63 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, 1000),
    ("n", 1, 10_000),
)
_NUMBERS = (
    ("temperature", 0, 1e6),
    ("top_p", 1e-6, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-3, 1e3),
    ("presence_penalty", -1e3, 1e3),
    ("frequency_penalty", -1e3, 1e3),
)
CONSTRAINTS = ("json_schema", "regex", "grammar", "choices")
PHASES = ("draft", "verify", "accept", "compact", "host")


@dataclass(frozen=True)
class SamplingParams:
    """Says how one prompt is continued.

    The parameters shape every verified node in this order: constraint, logit_bias, penalties, temperature, top_k,
    top_p, min_p.

    max_new_tokens: output tokens, at most; the model's context may end first.
    temperature: 0 takes the most likely token.  top_k: 0 is off.  top_p: 1 is off.  min_p: 0 is off.
    repetition_penalty: divides positive and multiplies negative scores of tokens in prompt and output; 1 is off.
    presence_penalty, frequency_penalty: subtracted from the scores of output tokens, once and per occurrence.
    logit_bias: token id -> finite number added to its score.
    seed: fixes the text at temperature > 0. Under the rule `match` the seed alone does; under other rules the text
      depends on the drafts too.
    stop: strings that end the text and are not part of it, or a function that makes the StopSearch of a text.
    ignore_eos: continues past the end-of-text token.
    stop_token_ids: tokens that end the text, under ignore_eos too. Their own text is not part of it.
    min_tokens: of the output, before one that ends it or completes a stop string. Until then the end-of-text token
      and stop_token_ids have probability 0, except where a constraint allows nothing else.
    skip_special_tokens: leaves special tokens out of the text. Tokens that end a text are never part of it.
    logprobs: number of most likely tokens reported per position, by the model's unprocessed distribution; 0 is off.
    n: samples per prompt; sample i uses seed + i.
    trace: records every cycle's tree, accepted nodes and bonus token.
    json_schema: the text is JSON of this schema (a dict, or its JSON text; kept as text); {} is any JSON object.
    regex: the whole text matches this expression.  grammar: the text follows this Lark grammar of llguidance, which may
      name special tokens, or this GBNF grammar of llama.cpp.  choices: the text is one of these strings.  One of the
      four at most is a constraint: tokens that cannot continue a text of its language have probability 0. Stop
      strings, stop tokens and max_new_tokens may still cut the text. Where the language ends, so does the text, even
      under ignore_eos.
    adapter: name of the engine's adapter that continues the prompt; None: the model as it is.

    Raises ValueError naming the parameter, for an unknown name or a value out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int = 0
    stop: str | Sequence[str] | Callable[[], Any] = ()
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: int = 0
    n: int = 1
    trace: bool = False
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choices: Sequence[str] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            object.__setattr__(self, name, check_integer(name, getattr(self, name), low, high))
        for name, least, most in _NUMBERS:
            object.__setattr__(self, name, check_number(name, getattr(self, name), least, most))
        # A temperature whose reciprocal overflows float32 has no distribution; it means greedy, so say so.
        if 0 < self.temperature < 1e-4:
            raise ValueError(f"temperature: expected 0 (greedy) or at least 1e-4, got {self.temperature!r}")
        if self.seed + self.n - 1 >= 2**63:
            raise ValueError(f"seed: seed + n - 1 must stay below 2**63, got {self.seed!r}")
        for name in ("ignore_eos", "trace", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {shown(getattr(self, name))}")
        if self.adapter is not None and (not isinstance(self.adapter, str) or not self.adapter):
            raise ValueError(f"adapter: expected the name of an adapter or None, got {shown(self.adapter)}")
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens: expected at most max_new_tokens={self.max_new_tokens}, got {self.min_tokens}"
            )
        self._check_stop()
        self._check_stop_token_ids()
        self._check_logit_bias()
        self._check_constraint()

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> SamplingParams:
        """Takes the parameters from the named arguments of a function; missing ones keep their defaults."""
        return cls(**{each.name: arguments[each.name] for each in fields(cls) if each.name in arguments})

    @property
    def constraint(self) -> str | None:
        """The name of the parameter that constrains the text."""
        return next((name for name in CONSTRAINTS if getattr(self, name) is not None), None)

    @property
    def reads_logits(self) -> bool:
        """Whether more than the most likely allowed token of the model's own distribution matters."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(self.temperature or self.logprobs or self.logit_bias or penalties)

    def _check_stop(self) -> None:
        if callable(self.stop):
            return
        several = self.stop is None or isinstance(self.stop, list | tuple)
        stops = tuple(self.stop or ()) if several else (self.stop,)
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop: expected a non-empty string or a list of them, got {shown(text)}")
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(f"stop: {shown(text)} is not valid UTF-8 text, so no output can contain it") from error
        object.__setattr__(self, "stop", stops)

    def _check_stop_token_ids(self) -> None:
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Collection):
            raise ValueError(f"stop_token_ids: expected a list of token ids, got {shown(ids)}")
        checked = dict.fromkeys(check_integer("stop_token_ids", token, 0, 2**31 - 1) for token in ids)
        object.__setattr__(self, "stop_token_ids", tuple(checked))

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias: expected a mapping of token id to number, got {type(bias).__name__}")
        checked = {
            check_integer("logit_bias: token id", token, 0, 2**31 - 1): check_number(
                f"logit_bias[{token}]", value, -1e6, 1e6
            )
            for token, value in bias.items()
        }
        object.__setattr__(self, "logit_bias", checked)

    def _check_constraint(self) -> None:
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _json_text(self.json_schema))
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                check_text(name, text)
        if self.choices is not None:
            if not isinstance(self.choices, list | tuple) or not self.choices:
                raise ValueError(f"choices: expected a list of one or more strings, got {shown(self.choices)}")
            for number, text in enumerate(self.choices):
                check_text(f"choices[{number}]", text)
            object.__setattr__(self, "choices", tuple(self.choices))
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: a text has one constraint at most, {given[0]} is given too")


def _json_text(schema: Any) -> str:
    """The JSON text of a schema, which no caller can change any more."""
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema: expected the JSON text of an object: {error}") from None
    else:
        parsed = schema
    if not isinstance(parsed, Mapping):
        raise ValueError(f"json_schema: expected a JSON object, got {shown(parsed)}")
    try:
        text = json.dumps(dict(parsed), allow_nan=False, ensure_ascii=False)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError too
        raise ValueError(f"json_schema: expected plain JSON values: {error}") from None
    return text


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities of one output token and of the most likely ones, by the model's unprocessed distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CycleTrace:
    """Describes one cycle: the tree (node 0 is the root, parent -1), the accepted nodes after it, and the bonus token.

    The committed tokens are those of `accepted` and `bonus`. The last cycle of a request is cut where the request ends:
    bonus is None when an accepted token ends it.
    sources: for each accepted node the drafters that proposed it, by the names of GenerationStats.sources.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    bonus: int | None
    sources: tuple[tuple[str, ...], ...] = ()


@dataclass
class SourceStats:
    """Counts the verified nodes of one source, and the accepted ones among them."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class GenerationStats:
    """Statistics of one output. Seconds are wall-clock time, shared with the other requests of the batch.

    tau: mean committed tokens per cycle, bonus token included.
    rule, lossless: the rule's name, and whether it preserves the target's output.
    relaxed: accepted tokens that the exact rule refuses; 0 for a lossless rule.
    experts_per_layer: how many experts of a mixture a layer read in a cycle's pass, which has the rows of all requests
      of the batch: the mean of layers and cycles. None for a dense model.
    acceptance_by_depth: entry d is the share of cycles drafting to depth d + 1 or deeper that accepted a node there.
    sources: counts by the parts of `combine`, or by the texts of `suffix` (text, corpus, earlier); `grammar` has the
      tokens that a constraint forces. A node with several sources counts for each. Empty for other drafters.
    deliveries: for each cycle, the seconds from the request to its tokens, and their number.
    prefix_hit_tokens: prompt tokens found in the prefix cache.
    prefill_seconds: from the first pass over the prompt to the last; of a pass with several prompts, its part by rows.
    tokens_per_second: output tokens over prefill and decode time together.
    """

    rule: str = "match"
    lossless: bool = True
    relaxed: int = 0
    cycles: int = 0
    tau: float = 0.0
    experts_per_layer: float | None = None
    acceptance_by_depth: list[float] = field(default_factory=list)
    sources: dict[str, SourceStats] = field(default_factory=dict)
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    prefix_hit_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    seconds_by_phase: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


@dataclass
class GenerationOutput:
    """One continuation of a prompt.

    text: ends before a stop string.  token_ids: include the end-of-text token.
    finish_reason: `stop` (end of text, or a stop string), `length`, or `deadline` (see AsyncEngine).
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    stats: GenerationStats
    trace: list[CycleTrace] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values."""
        return asdict(self)


Outputs = Any  # a GenerationOutput, a list of them, or lists of n of them: as prompts and n ask for


@dataclass(frozen=True)
class StreamEvent:
    """Delivers what one cycle added to a text; the last event carries the output.

    accepted: how many of the tokens were drafted.
    index: number of the text among those of the call, prompt by prompt, sample by sample; see AsyncEngine.stream.
    logprobs, trace: of these tokens and their cycles, where SamplingParams asks for them.
    """

    text: str
    token_ids: list[int]
    accepted: int
    output: GenerationOutput | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    trace: list[CycleTrace] | None = None


class Overloaded(RuntimeError):
    """The queue is full: nothing was done for the call, which may be tried again later."""


class Closed(RuntimeError):
    """The engine was closed before the request finished, or before it came."""


class GenerationFailed(RuntimeError):
    """A step failed for the reason in __cause__, and the request with it; the engine may serve others."""


class ConstraintFailed(GenerationFailed):
    """The grammar engine could not follow the text of one request any further; other requests go on."""


class PromptTooLong(ValueError):
    """The model's context does not hold the prompt."""


class ModelFetchError(RuntimeError):
    """A model could not be fetched to this machine; the message gives the reason and a remedy."""


class RankFailed(RuntimeError):
    """A process of a tensor-parallel engine ended or did not answer; the engine serves no more requests."""
