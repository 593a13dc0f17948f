"""One race: all contenders at one temperature and batch size.

The engines answer each question one after the other. Their order rotates from call to call, so that a slow spell of the
machine affects all of them. The answers of plain decoding are the chat history of every engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from specengine.bench.peers.base import Peer
from specengine.bench.race.contenders import ContenderEngine
from specengine.bench.race.questions import Question, prompt_of
from specengine.bench.race.run import AnswerKey
from specengine.bench.race.run_stats import RunStats
from specengine.engine.engine import Engine
from specengine.engine.prompts import encode_prompt
from specengine.tensor_parallel.loading import LoadedModel
from specengine.types import GenerationOutput, SamplingParams

_WARM_UP_TOKENS = 16
# OpenMP threads spin for some milliseconds after their last loop. In a race with peers they would slow the next engine.
PAUSE_SECONDS = 0.02


def batches_of(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Returns groups of `size` questions; the last group is filled up with the first questions."""
    if size < 1:
        raise ValueError(f"batch: expected a positive size, got {size}")
    count = len(questions)
    return [[questions[(start + i) % count] for i in range(size)] for start in range(0, count, size)]


def pause_between(engines: Sequence[ContenderEngine | Peer]) -> float:
    """Returns the seconds to wait before each call of these engines."""
    return PAUSE_SECONDS if any(isinstance(engine, Peer) for engine in engines) else 0.0


def ask(
    engine: ContenderEngine | Peer, prompts: list[list[int]], params: list[SamplingParams], pause: float
) -> tuple[list[GenerationOutput], float]:
    """Returns an engine's answers and the seconds that they took; a peer that failed has no answers.

    params: of each prompt; only engines of ours take different ones.
    """
    if isinstance(engine, Peer):
        engine.make_room(prompts, params[0])
    time.sleep(pause)
    begin = time.perf_counter()
    if isinstance(engine, Engine) and any(own != params[0] for own in params):
        outputs = engine.generate(prompts, params)
    else:
        outputs = engine.generate(prompts, params[0])
    return outputs, time.perf_counter() - begin


class Race:
    """Runs engines on the same questions, repetition by repetition.

    base: position of plain decoding in `engines`.  groups: questions that share a batch.
    identical: one flag per engine and answer, whether all repetitions equal the first answer of plain decoding.
    """

    def __init__(
        self,
        model: LoadedModel,
        engines: Sequence[ContenderEngine | Peer],
        base: int,
        groups: list[list[Question]],
        params: SamplingParams,
    ) -> None:
        others = [engine for engine in engines if not isinstance(engine, Engine)]
        if others and any(question.json_schema for group in groups for question in group):
            raise ValueError("questions: only specengine's own engines answer questions with a json_schema")
        self.model = model
        self.engines = engines
        self.base = base
        self.groups = groups
        self.params = params
        self.identical: dict[AnswerKey, list[bool]] = {}
        self.first_answers: list[dict[AnswerKey, GenerationOutput]] = [{} for _ in engines]
        self._history: list[list[list[GenerationOutput]]] = [[[] for _ in group] for group in groups]
        self._pause = pause_between(engines)
        self._calls = 0

    def warm_up(self) -> None:
        """Asks every engine a few tokens, so that its memory is mapped before anything is timed."""
        tokens = min(_WARM_UP_TOKENS, self.params.max_new_tokens)
        prompts = self.first_prompts(0)
        params = [replace(own, max_new_tokens=tokens) for own in self._params(self.groups[0])]
        for engine in self.engines:
            ask(engine, prompts, params, self._pause)

    def repetition(self, advance: Callable[[], None]) -> list[RunStats]:
        """Asks all questions once. Returns the statistics of each engine."""
        stats = [RunStats() for _ in self.engines]
        for number, group in enumerate(self.groups):
            for turn in range(max(len(question.turns) for question in group)):
                places = [i for i, question in enumerate(group) if turn < len(question.turns)]
                prompts = self._prompts(number, places, turn)
                params = self._params([group[place] for place in places])
                classes = {group[place].category for place in places}
                outputs: dict[int, list[GenerationOutput]] = {}
                self._calls += 1
                for step in range(len(self.engines)):
                    position = (self._calls + step) % len(self.engines)
                    outputs[position], seconds = ask(self.engines[position], prompts, params, self._pause)
                    if outputs[position]:
                        category = next(iter(classes)) if len(classes) == 1 else ""
                        stats[position].add(outputs[position], seconds, category)
                    advance()
                self._compare(number, turn, places, outputs)
        return stats

    def device_seconds(self, engine: ContenderEngine) -> dict[str, float] | None:
        """Returns median seconds of each phase of a cycle, over the first turns; None for cycles off the device."""
        if not isinstance(engine, Engine) or not engine.model.target.ops.on_device:
            return None
        with engine.timed_phases() as timings:
            for number in range(len(self.groups)):
                engine.generate(self.first_prompts(number), self._params(self.groups[number]))
        return {phase: median(each[phase] for each in timings) for phase in timings[0]}

    def first_prompts(self, number: int) -> list[list[int]]:
        """Returns the token ids of the first turns of a group."""
        return self._prompts(number, list(range(len(self.groups[number]))), 0)

    def _params(self, questions: Sequence[Question]) -> list[SamplingParams]:
        return [question.params(self.params) for question in questions]

    def _prompts(self, number: int, places: list[int], turn: int) -> list[list[int]]:
        """Returns token ids, so that every engine reads the same prompt."""
        prompts = []
        for place in places:
            question = self.groups[number][place]
            answers = self._history[number][place][:turn]
            try:
                prompt = prompt_of(question, answers, self.model, self.params.seed)
                prompts.append(encode_prompt(prompt, self.model.tokenizer, self.model.config))
            except ValueError as error:
                raise ValueError(f"question {question.name}: {error}") from error
        return prompts

    def _compare(self, number: int, turn: int, places: list[int], outputs: dict[int, list[GenerationOutput]]) -> None:
        """Keeps the first answers of plain decoding as history, and compares the tokens of every engine with them."""
        for index, place in enumerate(places):
            history = self._history[number][place]
            if turn == len(history):
                history.append(outputs[self.base][index])
            expected = history[turn].token_ids
            flags = self.identical.setdefault((number, place, turn), [True] * len(self.engines))
            for position, answers in outputs.items():
                flags[position] &= bool(answers) and answers[index].token_ids == expected
                if answers:
                    self.first_answers[position].setdefault((number, place, turn), answers[index])
