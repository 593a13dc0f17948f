"""The measurement: every configuration does the same work, one right after the other.

For every question and repetition all drafters, each under its rule, run in turn, in an order that rotates from call
to call, so that a slow spell of the machine falls on all of them. The base's answers are everybody's history. Peers
take their turns among the drafters, at batch 1.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low

from specengine.bench.contenders import Contender, open_contender
from specengine.bench.peers.base import Peer
from specengine.bench.questions import Question, prompt_of
from specengine.bench.synthetic import is_synthetic
from specengine.bench.tally import Tally
from specengine.engine import Engine
from specengine.models.loading import LoadedModel
from specengine.prompts import encode_prompt
from specengine.types import GenerationOutput, SamplingParams

BASE = "none"
_WARM_UP_TOKENS = 16
# Before every call of a race with peers: OpenMP's threads spin for some milliseconds after their last loop, which
# would fall on whoever comes next.
REST_SECONDS = 0.02


@dataclass
class Run:
    """What one drafter did under one rule at one batch size.

    identical: per answer, if every repetition gave the base's.
    peer: the mode of another engine that did it, None for ours.
    device_seconds: of a cycle by phase, where cycles run on the device; the median of a repetition of its own.
    answers: of the first repetition, by group, place and turn.
    """

    drafter: str
    batch: int
    repetitions: list[Tally] = field(default_factory=list)
    identical: dict[tuple[int, int, int], bool] = field(default_factory=dict)
    peer: str | None = None
    device_seconds: dict[str, float] | None = None
    rule: str = "match"
    answers: dict[tuple[int, int, int], GenerationOutput] = field(default_factory=dict)

    @property
    def median(self) -> Tally:
        """The repetition with the median time (the lower middle one of an even number)."""
        return _median(self.repetitions)

    @property
    def median_by_class(self) -> dict[str, Tally]:
        """Each class's own repetition with the median time."""
        return {name: _median([t.by_class[name] for t in self.repetitions]) for name in self.repetitions[0].by_class}


def _median(tallies: Sequence[Tally]) -> Tally:
    seconds = median_low(tally.seconds for tally in tallies)
    return next(tally for tally in tallies if tally.seconds == seconds)


def split_drafters(text: str) -> list[str]:
    """Splits a list such as `none,prompt_lookup,nodes=16`: `option=value` belongs to the drafter before it, and a
    number to a `synthetic` one.

    The base is put first if it is not named. Raises ValueError for an empty item or a stray option.
    """
    drafters: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        if not item:
            raise ValueError(f"drafters: expected names separated by commas, got {text!r}")
        number = re.fullmatch(r"[\d.]+", item) and drafters and is_synthetic(drafters[-1])
        if not number and not re.match(r"[\w-]+\s*=", item):
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
    rule: str | Sequence[str] = "match",
    peers: Sequence[Peer] = (),
    advance: Callable[[], None] = lambda: None,
) -> list[Run]:
    """One Run per batch size and drafter; drafters must hold the base, `advance` is called after every call.

    rule: one for all drafters, or one per drafter.

    A batch takes as many questions, starting over at the first so that the last batch is full; a question
    whose turns are over leaves its batch. A Run per peer too, at batch 1 and unless it failed on the way.
    Raises ValueError naming the question that cannot be asked.
    """
    if repetitions < 1:
        raise ValueError(f"repetitions: expected a positive number, got {repetitions}")
    # The trace is on for all, the base too: it counts acceptance, and costs microseconds per cycle.
    params = replace(params, trace=True)
    grouped = {batch: _batches(questions, batch) for batch in batches}
    rules = [rule] * len(drafters) if isinstance(rule, str) else rule
    pairs = list(zip(drafters, rules, strict=True))
    engines = [open_contender(model, name, rule=each, max_batch_size=max(batches)) for name, each in pairs]
    runs = []
    for batch, groups in grouped.items():
        racing = peers if batch == 1 else ()
        bench = _Bench(model, [*engines, *racing], drafters.index(BASE), groups, params)
        bench.warm_up()
        tallies = [bench.repetition(advance) for _ in range(repetitions)]
        phases = [bench.device_seconds(engine) for engine in engines] + [None] * len(racing)
        named = [(*pair, None) for pair in pairs] + [(peer.drafter, "match", peer) for peer in racing]
        for position, (name, each, peer) in enumerate(named):
            if peer is None or not peer.failed:
                same = {key: flags[position] for key, flags in bench.identical.items()}
                done, told = [tally[position] for tally in tallies], bench.told[position]
                runs.append(Run(name, batch, done, same, peer and peer.mode, phases[position], each, told))
    return runs


def calls_of(
    questions: Sequence[Question], drafters: int, batches: Sequence[int], repetitions: int, peers: int = 0
) -> int:
    """How often `measure` calls `advance`."""
    return repetitions * sum(
        max(len(q.turns) for q in group) * (drafters + (peers if batch == 1 else 0))
        for batch in batches
        for group in _batches(questions, batch)
    )


def _batches(questions: Sequence[Question], size: int) -> list[list[Question]]:
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


class _Bench:
    """All engines at one batch size."""

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
        prompts = self._prompts(0, list(range(len(self.groups[0]))), 0)
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
            for number, group in enumerate(self.groups):
                engine.generate(self._prompts(number, list(range(len(group))), 0), self.params)
        return {phase: median(each[phase] for each in timings) for phase in timings[0]}

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
