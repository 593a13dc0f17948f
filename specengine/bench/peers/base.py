"""What another engine must offer to be measured beside ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specengine.models.config import ModelConfig
from specengine.types import GenerationOutput, GenerationStats, SamplingParams


@dataclass(frozen=True)
class Setup:
    """What a peer is opened with, the same for all.

    name: of the model.  source: its GGUF file or checkpoint folder, None for random weights.  config: what it is.
    weights: weight format or way to run, empty for the peer's own choice.
    device: `cpu` or `cuda`.  scratch: folder for files that live as long as the run.
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
    """Tokens of one answer, when how many of them came (seconds since it was asked for), passes of the model (0: not
    known)."""

    token_ids: list[int]
    deliveries: list[tuple[float, int]]
    cycles: int


class Peer(ABC):
    """One mode of another engine: same checkpoint, same token ids, same threads, one prompt at a time.

    mode: `transformers`, `llama.cpp:Q8_0+prompt_lookup`.  drafter: what it drafts with.
    about: version, weights and settings for the record.
    failed: why it dropped out of the race, None while it is in it.
    """

    def __init__(self, mode: str, drafter: str, about: dict[str, str], setup: Setup) -> None:
        self.mode, self.drafter, self.about, self.setup = mode, drafter, about, setup
        self.failed: str | None = None

    def prepare(self, positions: int) -> None:
        """Makes room for prompts and answers of so many tokens together; not measured."""
        return

    @abstractmethod
    def answer(self, ids: list[int], params: SamplingParams, stop: frozenset[int]) -> Answer:
        """Continues one prompt from nothing, up to a token of `stop` (which the answer holds)."""

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[GenerationOutput]:
        """As Engine.generate, without text; an empty list once this peer has failed."""
        if self.failed:
            return []
        try:
            return [self._output(ids, params) for ids in prompts]
        except Exception as error:  # whatever another engine raises must not end the measurement of the rest
            self.failed = reason(error)
            return []

    def make_room(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """What `generate` of the same needs and nobody measures."""
        try:
            if not self.failed:
                longest = max(map(len, prompts))
                self.prepare(longest + min(params.max_new_tokens, self.setup.max_position - longest))
        except Exception as error:
            self.failed = reason(error)

    def _output(self, ids: list[int], params: SamplingParams) -> GenerationOutput:
        stop = frozenset() if params.ignore_eos else self.setup.eos_token_ids
        # The context's end cuts the answer, as it does ours.
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
    """One line on why a peer is not in the race."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed (pip install '.[peers]' in a clone)"
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"[:200]
