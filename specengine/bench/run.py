"""The measurement: every configuration does the same work, one right after the other.

For every question and repetition all drafters run in turn, in an order that rotates from call to call, so
that a slow spell of the machine falls on all of them. The base's answers are every drafter's history.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from specengine.bench.questions import Question, prompt_of
from specengine.bench.tally import Tally
from specengine.engine import Engine
from specengine.models.loading import LoadedModel
from specengine.types import GenerationOutput, Prompt, SamplingParams

BASE = "none"
_WARM_UP_TOKENS = 16


@dataclass
class Run:
    """What one drafter did at one batch size; identical: per answer, if every repetition gave the base's."""

    drafter: str
    batch: int
    repetitions: list[Tally] = field(default_factory=list)
    identical: dict[tuple[int, int, int], bool] = field(default_factory=dict)

    @property
    def median(self) -> Tally:
        """The repetition with the median time (the lower middle one of an even number)."""
        seconds = median_low(tally.seconds for tally in self.repetitions)
        return next(tally for tally in self.repetitions if tally.seconds == seconds)


def split_drafters(text: str) -> list[str]:
    """Splits a list such as `none,prompt_lookup,nodes=16`: `option=value` belongs to the drafter before it.

    The base is put first if it is not named. Raises ValueError for an empty item or a stray option.
    """
    drafters: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        if not item:
            raise ValueError(f"drafters: expected names separated by commas, got {text!r}")
        if not re.match(r"[\w-]+\s*=", item):
            drafters.append(item)
        elif drafters:
            drafters[-1] += f",{item}"
        else:
            raise ValueError(f"drafters: option {item!r} has no drafter before it in {text!r}")
    return drafters if BASE in drafters else [BASE, *drafters]


def measure(
    model: LoadedModel,
    drafters: Sequence[str],
    questions: Sequence[Question],
    params: SamplingParams,
    *,
    batches: Sequence[int] = (1,),
    repetitions: int = 3,
    rule: str = "match",
    advance: Callable[[], None] = lambda: None,
) -> list[Run]:
    """One Run per batch size and drafter; drafters must hold the base, `advance` is called after every call.

    A batch takes as many questions, starting over at the first so that the last batch is full; a question
    whose turns are over leaves its batch. Raises ValueError naming the question that cannot be asked.
    """
    if repetitions < 1:
        raise ValueError(f"repetitions: expected a positive number, got {repetitions}")
    # The trace is on for all, the base too: it counts acceptance, and costs microseconds per cycle.
    params = replace(params, trace=True)
    grouped = {batch: _batches(questions, batch) for batch in batches}
    engines = [Engine(model, drafter=name, rule=rule, max_batch_size=max(batches)) for name in drafters]
    runs = []
    for batch, groups in grouped.items():
        bench = _Bench(engines, drafters.index(BASE), groups, params)
        bench.warm_up()
        tallies = [bench.repetition(advance) for _ in range(repetitions)]
        for position, name in enumerate(drafters):
            same = {key: flags[position] for key, flags in bench.identical.items()}
            runs.append(Run(name, batch, [each[position] for each in tallies], same))
    return runs


def calls_of(questions: Sequence[Question], drafters: int, batches: Sequence[int], repetitions: int) -> int:
    """How often `measure` calls `advance`."""
    turns = sum(max(len(q.turns) for q in group) for batch in batches for group in _batches(questions, batch))
    return turns * drafters * repetitions


def _batches(questions: Sequence[Question], size: int) -> list[list[Question]]:
    if size < 1:
        raise ValueError(f"batch: expected a positive size, got {size}")
    count = len(questions)
    return [[questions[(start + i) % count] for i in range(size)] for start in range(0, count, size)]


class _Bench:
    """All engines at one batch size."""

    def __init__(
        self, engines: Sequence[Engine], base: int, groups: list[list[Question]], params: SamplingParams
    ) -> None:
        self.engines, self.base, self.groups, self.params = engines, base, groups, params
        self.answers: list[list[list[GenerationOutput]]] = [[[] for _ in group] for group in groups]
        self.identical: dict[tuple[int, int, int], list[bool]] = {}  # (group, place, turn) -> one flag per engine
        self._calls = 0

    def warm_up(self) -> None:
        """Lets every engine touch its memory once."""
        tokens = min(_WARM_UP_TOKENS, self.params.max_new_tokens)
        prompts = self._prompts(0, list(range(len(self.groups[0]))), 0)
        for engine in self.engines:
            self._ask(engine, self.groups[0], prompts, replace(self.params, max_new_tokens=tokens))

    def repetition(self, advance: Callable[[], None]) -> list[Tally]:
        """All questions once; one tally per engine."""
        tallies = [Tally() for _ in self.engines]
        for number, group in enumerate(self.groups):
            for turn in range(max(len(question.turns) for question in group)):
                places = [i for i, question in enumerate(group) if turn < len(question.turns)]
                prompts = self._prompts(number, places, turn)
                outputs: dict[int, list[GenerationOutput]] = {}
                self._calls += 1
                for step in range(len(self.engines)):
                    position = (self._calls + step) % len(self.engines)
                    asked = [group[place] for place in places]
                    outputs[position], seconds = self._ask(self.engines[position], asked, prompts, self.params)
                    tallies[position].add(outputs[position], seconds)
                    advance()
                self._compare(number, turn, places, outputs)
        return tallies

    def _prompts(self, number: int, places: list[int], turn: int) -> list[Prompt]:
        group, answers, model = self.groups[number], self.answers[number], self.engines[0].model
        return [prompt_of(group[place], answers[place][:turn], model, self.params.seed) for place in places]

    def _ask(
        self, engine: Engine, questions: list[Question], prompts: list[Prompt], params: SamplingParams
    ) -> tuple[list[GenerationOutput], float]:
        begin = time.perf_counter()
        try:
            outputs = engine.generate(prompts, params)
        except ValueError as error:
            names = ", ".join(dict.fromkeys(question.name for question in questions))
            raise ValueError(f"question {names}: {error}") from error
        return outputs, time.perf_counter() - begin

    def _compare(self, number: int, turn: int, places: list[int], outputs: dict[int, list[GenerationOutput]]) -> None:
        """Keeps the base's first answers as the history, and counts who gave the same tokens."""
        for index, place in enumerate(places):
            history = self.answers[number][place]
            if turn == len(history):
                history.append(outputs[self.base][index])
            expected = history[turn].token_ids
            flags = self.identical.setdefault((number, place, turn), [True] * len(self.engines))
            for position, found in outputs.items():
                flags[position] &= found[index].token_ids == expected
