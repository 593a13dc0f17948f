"""A peer: another engine in the same race."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specengine.models.config import ModelConfig
from specengine.types import GenerationOutput, GenerationStats, SamplingParams


@dataclass(frozen=True)
class Setup:
    """Holds the model and settings that a peer is opened with.

    name: of the model.  source: its GGUF file or checkpoint folder, None for random weights.
    weights: weight format or mode, empty for the default of the peer.
    device: `cpu` or `cuda`.  scratch: folder for temporary files of the run.
    """

    name: str
    source: Path | None
    config: ModelConfig
    weights: str
    threads: int
    device: str
    eos_token_ids: frozenset[int]
    scratch: Path

    @property
    def max_position(self) -> int:
        """Tokens of the model's context."""
        return self.config.max_position


@dataclass(frozen=True)
class Answer:
    """Holds the tokens of one answer.

    deliveries: (seconds since the request, number of tokens).  cycles: passes of the model, 0 if unknown.
    """

    token_ids: list[int]
    deliveries: list[tuple[float, int]]
    cycles: int


class Peer(ABC):
    """Runs one mode of another engine: same checkpoint, token ids and threads, one prompt at a time.

    mode: as `transformers` or `llama.cpp:Q8_0+prompt_lookup`.  drafter: `none` or `prompt_lookup`.
    about: version, weights and settings for the record.
    failed: the reason why it left the race, None before that.
    """

    def __init__(self, mode: str, drafter: str, about: dict[str, str], setup: Setup) -> None:
        self.mode = mode
        self.drafter = drafter
        self.about = about
        self.setup = setup
        self.failed: str | None = None

    def prepare(self, positions: int) -> None:
        """Allocates a cache for a prompt and its answer of `positions` tokens; this time is not measured."""
        return

    @abstractmethod
    def answer(self, ids: list[int], params: SamplingParams, stop: frozenset[int]) -> Answer:
        """Answers one prompt with an empty cache, up to and including a token of `stop`."""

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[GenerationOutput]:
        """Returns outputs as Engine.generate, without text; an empty list after a failure."""
        if self.failed:
            return []
        try:
            return [self._output(ids, params) for ids in prompts]
        except Exception as error:  # an exception of another engine must not end the race
            self.failed = reason(error)
            return []

    def make_room(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Prepares for `generate` of the same prompts; this time is not measured."""
        try:
            if not self.failed:
                longest = max(map(len, prompts))
                self.prepare(longest + min(params.max_new_tokens, self.setup.max_position - longest))
        except Exception as error:
            self.failed = reason(error)

    def _output(self, ids: list[int], params: SamplingParams) -> GenerationOutput:
        stop = frozenset() if params.ignore_eos else self.setup.eos_token_ids
        # The end of the context cuts the answer, as in specengine.
        limit = min(params.max_new_tokens, self.setup.max_position - len(ids))
        answer = self.answer(ids, replace(params, max_new_tokens=limit), stop)
        count = len(answer.token_ids)
        tau = count / answer.cycles if answer.cycles else 0.0
        stats = GenerationStats(
            cycles=answer.cycles, tau=tau, deliveries=answer.deliveries, prefill_seconds=answer.deliveries[0][0]
        )
        ended = "stop" if answer.token_ids[-1] in stop else "length"
        return GenerationOutput("", answer.token_ids, ids, ended, None, stats)


def reason(error: BaseException) -> str:
    """Returns one line that says why a peer is left out."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed (pip install '.[peers]' in a clone)"
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"[:200]
