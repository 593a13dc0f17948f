"""All contenders at one temperature and batch size: they do the same work, one right after the other.

For every question all drafters, each under its rule, run in turn, in an order that rotates from call to call, so that a
slow spell of the machine falls on all of them. The base's answers are everybody's history. Peers take their turns among
the drafters, at batch 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from specengine.bench.peers.base import Peer
from specengine.bench.race.contenders import Contender
from specengine.bench.race.questions import Question, prompt_of
from specengine.bench.race.run_stats import Tally
from specengine.engine.engine import Engine
from specengine.engine.prompts import encode_prompt
from specengine.tensor_parallel.loading import LoadedModel
from specengine.types import GenerationOutput, SamplingParams

_WARM_UP_TOKENS = 16
# Before every call of a race with peers: OpenMP's threads spin for some milliseconds after their last loop, which
# would fall on whoever comes next.
REST_SECONDS = 0.02


def batches_of(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Questions that share a batch; the last batch is filled up with the first ones."""
    if size < 1:
        raise ValueError(f"batch: expected a positive size, got {size}")
    count = len(questions)
    return [[questions[(start + i) % count] for i in range(size)] for start in range(0, count, size)]


def rest_of(engines: Sequence[Contender | Peer]) -> float:
    """Seconds of rest before each call of these engines."""
    return REST_SECONDS if any(isinstance(engine, Peer) for engine in engines) else 0.0


def ask(
    engine: Contender | Peer, prompts: list[list[int]], params: SamplingParams, rest: float
) -> tuple[list[GenerationOutput], float]:
    """The answers (none from a peer that failed) and the seconds they took."""
    if isinstance(engine, Peer):
        engine.make_room(prompts, params)
    time.sleep(rest)
    begin = time.perf_counter()
    outputs = engine.generate(prompts, params)
    return outputs, time.perf_counter() - begin


class Contest:
    """engines: base and rivals, by position.  groups: questions that share a batch."""

    def __init__(
        self,
        model: LoadedModel,
        engines: Sequence[Contender | Peer],
        base: int,
        groups: list[list[Question]],
        params: SamplingParams,
    ) -> None:
        self.model, self.engines, self.base, self.groups, self.params = model, engines, base, groups, params
        self.answers: list[list[list[GenerationOutput]]] = [[[] for _ in group] for group in groups]
        self.identical: dict[tuple[int, int, int], list[bool]] = {}  # (group, place, turn) -> one flag per engine
        self.told: list[dict[tuple[int, int, int], GenerationOutput]] = [{} for _ in engines]
        self.rest = rest_of(engines)
        self._calls = 0

    def warm_up(self) -> None:
        """Lets every engine touch its memory once."""
        tokens = min(_WARM_UP_TOKENS, self.params.max_new_tokens)
        prompts = self.prompts(0)
        for engine in self.engines:
            ask(engine, prompts, replace(self.params, max_new_tokens=tokens), self.rest)

    def repetition(self, advance: Callable[[], None]) -> list[Tally]:
        """All questions once; one tally per engine."""
        tallies = [Tally() for _ in self.engines]
        for number, group in enumerate(self.groups):
            for turn in range(max(len(question.turns) for question in group)):
                places = [i for i, question in enumerate(group) if turn < len(question.turns)]
                prompts = self._prompts(number, places, turn)
                classes = {group[place].category for place in places}
                outputs: dict[int, list[GenerationOutput]] = {}
                self._calls += 1
                for step in range(len(self.engines)):
                    position = (self._calls + step) % len(self.engines)
                    outputs[position], seconds = ask(self.engines[position], prompts, self.params, self.rest)
                    if outputs[position]:
                        category = next(iter(classes)) if len(classes) == 1 else ""
                        tallies[position].add(outputs[position], seconds, category)
                    advance()
                self._compare(number, turn, places, outputs)
        return tallies

    def device_seconds(self, engine: Contender) -> dict[str, float] | None:
        """What the phases of a cycle take on the device, over the first turns of all questions."""
        if not isinstance(engine, Engine) or not engine.model.target.ops.resident:
            return None
        with engine.timed_phases() as timings:
            for number in range(len(self.groups)):
                engine.generate(self.prompts(number), self.params)
        return {phase: median(each[phase] for each in timings) for phase in timings[0]}

    def prompts(self, number: int) -> list[list[int]]:
        """Of the first turns of a group."""
        return self._prompts(number, list(range(len(self.groups[number]))), 0)

    def _prompts(self, number: int, places: list[int], turn: int) -> list[list[int]]:
        """Token ids, so that all engines are given the same ones."""
        prompts = []
        for place in places:
            question, answers = self.groups[number][place], self.answers[number][place][:turn]
            try:
                prompt = prompt_of(question, answers, self.model, self.params.seed)
                prompts.append(encode_prompt(prompt, self.model.tokenizer, self.model.config))
            except ValueError as error:
                raise ValueError(f"question {question.name}: {error}") from error
        return prompts

    def _compare(self, number: int, turn: int, places: list[int], outputs: dict[int, list[GenerationOutput]]) -> None:
        """Keeps the base's first answers as the history, and counts who gave the same tokens."""
        for index, place in enumerate(places):
            history = self.answers[number][place]
            if turn == len(history):
                history.append(outputs[self.base][index])
            expected = history[turn].token_ids
            flags = self.identical.setdefault((number, place, turn), [True] * len(self.engines))
            for position, found in outputs.items():
                flags[position] &= bool(found) and found[index].token_ids == expected
                if found:
                    self.told[position].setdefault((number, place, turn), found[index])
