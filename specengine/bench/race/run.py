"""The measurement: repetitions, each of which goes through all temperatures and batch sizes, and what came of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from specengine.bench.peers.base import Peer
from specengine.bench.race.contenders import open_contender
from specengine.bench.race.questions import Question
from specengine.bench.race.race import Contest, batches_of
from specengine.bench.race.run_stats import Tally
from specengine.bench.race.synthetic import is_synthetic
from specengine.tensor_parallel.loading import LoadedModel
from specengine.types import GenerationOutput, SamplingParams

BASE = "none"


@dataclass
class Run:
    """What one drafter did under one rule at one batch size.

    identical: per answer, if every repetition gave the base's.
    peer: the mode of another engine that did it, None for ours.
    device_seconds: of a cycle by phase, where cycles run on the device; the median of a repetition of its own.
    answers: of the first repetition, by group, place and turn.
    peak_memory: bytes, where it was asked for.
    """

    drafter: str
    batch: int
    repetitions: list[Tally] = field(default_factory=list)
    identical: dict[tuple[int, int, int], bool] = field(default_factory=dict)
    peer: str | None = None
    device_seconds: dict[str, float] | None = None
    rule: str = "match"
    answers: dict[tuple[int, int, int], GenerationOutput] = field(default_factory=dict)
    temperature: float = 0.0
    peak_memory: int | None = None

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
    temperatures: Sequence[float] | None = None,
    batches: Sequence[int] = (1,),
    repetitions: int = 3,
    rule: str | Sequence[str] = "match",
    peers: Sequence[Peer] = (),
    advance: Callable[[], None] = lambda: None,
) -> list[Run]:
    """One Run per temperature (those of params if not given), batch size and drafter; drafters must hold the base,
    `advance` is called after every call.

    rule: one for all drafters, or one per drafter.

    A batch takes as many questions, starting over at the first so that the last batch is full; a question
    whose turns are over leaves its batch. A Run per peer too, at batch 1 and unless it failed on the way.
    Raises ValueError naming the question that cannot be asked.
    """
    if repetitions < 1:
        raise ValueError(f"repetitions: expected a positive number, got {repetitions}")
    # The trace is on for all, the base too: it counts acceptance, and costs microseconds per cycle.
    params = replace(params, trace=True)
    grouped = {batch: batches_of(questions, batch) for batch in batches}
    rules = [rule] * len(drafters) if isinstance(rule, str) else rule
    pairs = list(zip(drafters, rules, strict=True))
    base, contests = drafters.index(BASE), []
    for temperature in temperatures or (params.temperature,):
        # Engines of its own: what drafters learn at one temperature would mislead them at another.
        engines = [open_contender(model, name, rule=each, max_batch_size=max(batches)) for name, each in pairs]
        for batch, groups in grouped.items():
            racing, asked = [*engines, *(peers if batch == 1 else ())], replace(params, temperature=temperature)
            contests.append(Contest(model, racing, base, groups, asked))
    for contest in contests:
        contest.warm_up()
    tallies = [[contest.repetition(advance) for contest in contests] for _ in range(repetitions)]
    return [run for i, contest in enumerate(contests) for run in _runs(contest, pairs, [each[i] for each in tallies])]


def _runs(contest: Contest, pairs: Sequence[tuple[str, str]], tallies: Sequence[list[Tally]]) -> list[Run]:
    """What the engines of one contest did, in their order."""
    runs = []
    for position, engine in enumerate(contest.engines):
        peer = engine if isinstance(engine, Peer) else None
        if peer is None or not peer.failed:
            name, rule = (peer.drafter, "match") if peer else pairs[position]
            runs.append(
                Run(
                    drafter=name,
                    batch=len(contest.groups[0]),
                    repetitions=[tally[position] for tally in tallies],
                    identical={key: flags[position] for key, flags in contest.identical.items()},
                    peer=None if peer is None else peer.mode,
                    device_seconds=None if isinstance(engine, Peer) else contest.device_seconds(engine),
                    rule=rule,
                    answers=contest.told[position],
                    temperature=contest.params.temperature,
                )
            )
    return runs


def calls_of(
    questions: Sequence[Question], drafters: int, batches: Sequence[int], repetitions: int, peers: int = 0
) -> int:
    """How often `measure` calls `advance`."""
    return repetitions * sum(
        max(len(q.turns) for q in group) * (drafters + (peers if batch == 1 else 0))
        for batch in batches
        for group in batches_of(questions, batch)
    )
