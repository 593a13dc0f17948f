"""The measurement: every repetition goes through all temperatures and batch sizes in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specengine.bench.peers.base import Peer
from specengine.bench.race.contenders import BASE, Contender, open_contender
from specengine.bench.race.expert_passes import expert_passes
from specengine.bench.race.questions import Question
from specengine.bench.race.race import Race, batches_of
from specengine.bench.race.run import Run
from specengine.bench.race.run_stats import RunStats
from specengine.models.lora.adapters import Adapters
from specengine.tensor_parallel.loading import LoadedModel
from specengine.types import SamplingParams


@dataclass(frozen=True)
class RaceSettings:
    """temperatures: empty for the temperature of the sampling parameters.  adapters: that these may name."""

    temperatures: Sequence[float] = ()
    batches: Sequence[int] = (1,)
    repetitions: int = 3
    adapters: Adapters | None = None


def measure(
    model: LoadedModel,
    contenders: Sequence[Contender],
    questions: Sequence[Question],
    params: SamplingParams,
    settings: RaceSettings,
    *,
    peers: Sequence[Peer] = (),
    advance: Callable[[], None] = lambda: None,
) -> list[Run]:
    """Measures every contender at every temperature and batch size. Returns a Run for each, in that order.

    contenders: must hold plain decoding.  advance: called after every call of an engine.
    peers: measured at batch 1; a peer that fails on the way has no Run.

    A batch takes as many questions as its size. The last batch is filled up with the first questions, and a
    question leaves its batch after its last turn.
    Raises ValueError for a question that cannot be asked.
    """
    if settings.repetitions < 1:
        raise ValueError(f"repetitions: expected a positive number, got {settings.repetitions}")
    # Every engine traces, plain decoding too: the trace counts acceptance and costs microseconds a cycle.
    params = replace(params, trace=True)
    grouped = {batch: batches_of(questions, batch) for batch in settings.batches}
    base = [each.drafter for each in contenders].index(BASE)
    races: list[Race] = []
    for temperature in settings.temperatures or (params.temperature,):
        # Each temperature has its own engines, because drafters adapt to the acceptance that they measure.
        engines = [
            open_contender(
                model, each.drafter, rule=each.rule, max_batch_size=max(settings.batches), adapters=settings.adapters
            )
            for each in contenders
        ]
        for batch, groups in grouped.items():
            racing = [*engines, *(peers if batch == 1 else ())]
            races.append(Race(model, racing, base, groups, replace(params, temperature=temperature)))
    for race in races:
        race.warm_up()
    repetitions = [[race.repetition(advance) for race in races] for _ in range(settings.repetitions)]
    return [run for i, race in enumerate(races) for run in _runs(race, contenders, [each[i] for each in repetitions])]


def _runs(race: Race, contenders: Sequence[Contender], repetitions: Sequence[list[RunStats]]) -> list[Run]:
    """Returns the results of one race's engines, in their order."""
    runs = []
    for position, engine in enumerate(race.engines):
        peer = engine if isinstance(engine, Peer) else None
        if peer and peer.failed:
            continue
        contender = Contender(peer.drafter) if peer else contenders[position]
        runs.append(
            Run(
                drafter=contender.drafter,
                batch=len(race.groups[0]),
                repetitions=[stats[position] for stats in repetitions],
                identical={key: flags[position] for key, flags in race.identical.items()},
                peer=peer.mode if peer else None,
                device_seconds=None if isinstance(engine, Peer) else race.device_seconds(engine),
                rule=contender.rule,
                answers=race.first_answers[position],
                temperature=race.params.temperature,
                expert_passes=expert_passes(engine),
            )
        )
    return runs


def calls_of(questions: Sequence[Question], settings: RaceSettings, contenders: int, peers: int = 0) -> int:
    """Returns how often `measure` calls `advance` at one temperature."""
    return settings.repetitions * sum(
        max(len(question.turns) for question in group) * (contenders + (peers if batch == 1 else 0))
        for batch in settings.batches
        for group in batches_of(questions, batch)
    )
