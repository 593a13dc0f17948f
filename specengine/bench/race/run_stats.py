"""Statistics of one engine in one repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specengine.bench.race.latency import gaps
from specengine.types import PHASES, CycleTrace, GenerationOutput


@dataclass
class RunStats:
    """Adds up the calls of one engine.

    passes: cycles of whole batches.  cycles: cycles of every request.
    cached_tokens: cached tokens that all cycles read, estimated by each request's length halfway through its answer.
    drafted, accepted, reached: by depth from 1, the cycles that drafted to this depth, that accepted a node there, and
    that drafted there after they accepted a node one level above.
    first_tokens: seconds from each request to its first token.  gaps: seconds between two tokens after that.
    by_class: calls whose questions are all of one class.
    """

    seconds: float = 0.0
    prefill_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    passes: int = 0
    cycles: int = 0
    tokens: int = 0
    cached_tokens: float = 0.0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    by_class: dict[str, RunStats] = field(default_factory=dict)

    def add(self, outputs: Sequence[GenerationOutput], seconds: float, category: str = "") -> None:
        """Adds one call: traced outputs of one batch whose requests were all admitted before the first cycle."""
        if category:
            self.by_class.setdefault(category, RunStats()).add(outputs, seconds)
        # The request with the most cycles took part in every pass, so its phases are those of the batch.
        longest = max(outputs, key=lambda output: output.stats.cycles).stats
        prefill = sum(output.stats.prefill_seconds for output in outputs)
        phases = {phase: longest.seconds_by_phase[phase] for phase in PHASES if phase != "host"}
        # A request's own host time includes the prefill of later requests. This remainder excludes it.
        phases["host"] = max(0.0, seconds - prefill - sum(phases.values()))
        for phase, spent in phases.items():
            self.phase_seconds[phase] += spent
        self.seconds += seconds
        self.prefill_seconds += prefill
        self.passes += longest.cycles
        for output in outputs:
            self.cycles += output.stats.cycles
            self.tokens += len(output.token_ids)
            self.cached_tokens += output.stats.cycles * (len(output.prompt_token_ids) + len(output.token_ids) / 2)
            if deliveries := output.stats.deliveries:
                self.first_tokens.append(deliveries[0][0])
                self.gaps += gaps(deliveries)
            for cycle in output.trace or ():
                self._add_cycle(cycle)

    @property
    def tau(self) -> float | None:
        """Tokens per cycle; None for a peer that does not report its cycles."""
        return self.tokens / self.cycles if self.cycles else None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Accepted over drafted, by depth, as in GenerationStats; over all cycles."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]

    @property
    def level_acceptance(self) -> list[float | None]:
        """Share of drafted levels that were accepted, of the cycles that accepted the level above; None without any."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached if reached else None for accepted, reached in pairs]

    @property
    def ms_per_cycle(self) -> dict[str, float]:
        """Milliseconds per pass, by phase; with the prefill they add up to the wall time."""
        return {phase: 1e3 * seconds / self.passes for phase, seconds in self.phase_seconds.items()}

    def _add_cycle(self, cycle: CycleTrace) -> None:
        depths = [0]
        for parent in cycle.parents[1:]:
            depths.append(depths[parent] + 1)
        taken = len(cycle.accepted)
        # If an accepted token ended the request, the target did not judge the next level.
        judged = taken if cycle.bonus is None else taken + 1
        for depth in range(max(depths)):
            if depth == len(self.drafted):
                self.drafted.append(0)
                self.accepted.append(0)
                self.reached.append(0)
            self.drafted[depth] += 1
            self.accepted[depth] += depth < taken
            self.reached[depth] += depth < judged
