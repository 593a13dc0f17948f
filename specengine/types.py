"""The nouns: what a request asks for and what it gets back."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

_INTEGERS = (
    ("max_new_tokens", 1, 2**31 - 1),
    ("top_k", 0, 2**31 - 1),
    ("seed", 0, 2**63 - 1),
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
PHASES = ("draft", "verify", "accept", "compact", "host")


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued; unknown names and out-of-range values are refused.

    The parameters shape every verified node in this order: logit_bias, penalties, temperature, top_k, top_p, min_p.

    max_new_tokens: at most this many tokens (fewer where the model's context ends first).
    temperature: 0 takes the most likely token.  top_k: 0 is off.  top_p: 1 is off.  min_p: 0 is off.
    repetition_penalty: divides positive and multiplies negative scores of tokens in prompt and output; 1 is off.
    presence_penalty, frequency_penalty: subtracted from the scores of tokens in the output, once and per occurrence.
    logit_bias: token id -> finite number added to its score.
    seed: fixes the text at temperature > 0: under the rule `match` whatever the drafter and the batch, under others
      together with what is drafted.
    stop: strings that end the text (and are not part of it).  ignore_eos: keep going past the end-of-text token.
    logprobs: report this many most likely tokens per position, by the model's unprocessed distribution; 0 is off.
    n: samples per prompt; sample i is what seed + i gives.
    trace: record every cycle's tree, accepted nodes and bonus token.

    Raises ValueError naming the parameter.
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
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    n: int = 1
    trace: bool = False

    def __post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            object.__setattr__(self, name, _integer(name, getattr(self, name), low, high))
        for name, least, most in _NUMBERS:
            object.__setattr__(self, name, _number(name, getattr(self, name), least, most))
        # A temperature whose reciprocal overflows float32 has no distribution; it means greedy, so say so.
        if 0 < self.temperature < 1e-4:
            raise ValueError(f"temperature: expected 0 (greedy) or at least 1e-4, got {self.temperature!r}")
        if self.seed + self.n - 1 >= 2**63:
            raise ValueError(f"seed: seed + n - 1 must stay below 2**63, got {self.seed!r}")
        for name in ("ignore_eos", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {_shown(getattr(self, name))}")
        self._check_stop()
        self._check_logit_bias()

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> SamplingParams:
        """The parameters among the named arguments of a function; those it does not have keep their defaults."""
        return cls(**{each.name: arguments[each.name] for each in fields(cls) if each.name in arguments})

    @property
    def reads_logits(self) -> bool:
        """Whether more than the most likely token of the model's own distribution matters."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(self.temperature or self.logprobs or self.logit_bias or penalties)

    def _check_stop(self) -> None:
        several = self.stop is None or isinstance(self.stop, list | tuple)
        stops = tuple(self.stop or ()) if several else (self.stop,)
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop: expected a non-empty string or a list of them, got {_shown(text)}")
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"stop: {_shown(text)} is not valid UTF-8 text, so no output can contain it"
                ) from error
        object.__setattr__(self, "stop", stops)

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias: expected a mapping of token id to number, got {type(bias).__name__}")
        checked = {
            _integer("logit_bias: token id", token, 0, 2**31 - 1): _number(f"logit_bias[{token}]", value, -1e6, 1e6)
            for token, value in bias.items()
        }
        object.__setattr__(self, "logit_bias", checked)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    """The value as an int (numpy's integers included)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name}: expected an integer from {low} to {high}, got {_shown(value)}")
    return int(value)


def _number(name: str, value: Any, low: float, high: float) -> float:
    """The value as a float (ints and numpy's floats included)."""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # which is not so for NaN
        raise ValueError(f"{name}: expected a number from {low} to {high}, got {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of an integer of many digits, or of whatever a caller's type does
        return f"what cannot be shown, of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:99]}\u2026"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one emitted token and of the most likely ones, by the model's unprocessed distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CycleTrace:
    """One cycle: the tree (node 0 is the root, parent -1), the accepted nodes after the root, and the bonus token.

    The tokens committed are those of `accepted` and `bonus`; in a request's last cycle both are cut where the
    sequence ended (bonus is None when an accepted token already ended it).
    sources: per accepted node who drafted it, by the names of GenerationStats.sources; empty where there are none.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    bonus: int | None
    sources: tuple[tuple[str, ...], ...] = ()


@dataclass
class SourceStats:
    """What a source of trees drafted: nodes that were verified, and those of them that were accepted."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class GenerationStats:
    """How the tokens came about; seconds are wall-clock and include the time other requests of the batch took.

    tau: mean committed tokens per cycle, bonus token included.
    rule, lossless: the rule's name, and whether the output is the target's under it.
    relaxed: accepted tokens that the exact rule would have refused; 0 where the rule is lossless.
    acceptance_by_depth: entry d is the fraction of cycles drafting to depth d + 1 or deeper that accepted a node there.
    sources: of a combination its parts that drafted, by name; of `suffix` alone: text, corpus, earlier. A node that
    several drafted counts for each of them. Empty for other drafters.
    deliveries: per cycle, seconds from the request to its tokens and how many these were.
    prefix_hit_tokens: first tokens of the prompt that the cache had of earlier texts.
    tokens_per_second: tokens over prefill and decode time together.
    """

    rule: str = "match"
    lossless: bool = True
    relaxed: int = 0
    cycles: int = 0
    tau: float = 0.0
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
    """One continuation. token_ids include the end-of-text token that ended it; text ends before a stop string.

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
        """The fields as plain JSON values."""
        return asdict(self)


Outputs = Any  # a GenerationOutput, a list of them or of lists of them: which, the prompts and n say


@dataclass(frozen=True)
class StreamEvent:
    """What one cycle added: its text, its tokens, how many of them were drafted; the last event carries the output.

    index: which of the request's texts this is, where AsyncEngine streams several: prompt by prompt, sample by sample.
    logprobs, trace: of these tokens, and of the cycles that brought them, where SamplingParams asks for them.
    """

    text: str
    token_ids: list[int]
    accepted: int
    output: GenerationOutput | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    trace: list[CycleTrace] | None = None


class ModelFetchError(RuntimeError):
    """A model could not be fetched to this machine; the message gives the reason and a remedy."""


class RankFailed(RuntimeError):
    """A process of a tensor-parallel engine ended or did not answer; the engine serves no more requests."""
