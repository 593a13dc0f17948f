"""Counting: what one configuration did in one repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specengine.bench.race.latency import gaps
from specengine.types import PHASES, CycleTrace, GenerationOutput


@dataclass
class Tally:
    """Sums over calls. passes: cycles of the whole batch; cycles: those of every request.

    cached_tokens: that the cycles of all requests read, about: halfway through its answer a request has the mean.
    first_tokens, gaps: seconds from each request to its first token, and between any two tokens after that.
    by_class: the calls whose questions are all of one class, by class.
    """

    seconds: float = 0.0
    prefill_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    passes: int = 0
    cycles: int = 0
    tokens: int = 0
    cached_tokens: float = 0.0
    drafted: list[int] = field(default_factory=list)  # cycles that drafted to depth d + 1
    accepted: list[int] = field(default_factory=list)  # cycles that accepted a node there
    reached: list[int] = field(default_factory=list)  # cycles that drafted there and accepted a node one level above
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    by_class: dict[str, Tally] = field(default_factory=dict)

    def add(self, outputs: Sequence[GenerationOutput], seconds: float, category: str = "") -> None:
        """One call: traced outputs that ran as one batch, all admitted before its first cycle."""
        if category:
            self.by_class.setdefault(category, Tally()).add(outputs, seconds)
        # The request that ran longest took part in every pass, so its phases are the batch's.
        longest = max(outputs, key=lambda output: output.stats.cycles).stats
        prefill = sum(output.stats.prefill_seconds for output in outputs)
        phases = {phase: longest.seconds_by_phase[phase] for phase in PHASES if phase != "host"}
        # A request's own host time holds the prefills of those admitted after it; this remainder does not.
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
        """Tokens per cycle; None for a peer that does not say how many it took."""
        return self.tokens / self.cycles if self.cycles else None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_by_depth(self) -> list[float]:
        """As GenerationStats has it, over all cycles together."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]

    @property
    def level_acceptance(self) -> list[float | None]:
        """How often a drafted level was accepted once the one above was; None where none ever was."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached if reached else None for accepted, reached in pairs]

    @property
    def ms_per_cycle(self) -> dict[str, float]:
        """Milliseconds per pass and phase; with the prefill they add up to the wall time."""
        return {phase: 1e3 * seconds / self.passes for phase, seconds in self.phase_seconds.items()}

    def _add_cycle(self, cycle: CycleTrace) -> None:
        depths = [0]
        for parent in cycle.parents[1:]:
            depths.append(depths[parent] + 1)
        taken = len(cycle.accepted)
        # Where an accepted token ended the request, nobody was asked about the next level.
        asked = taken if cycle.bonus is None else taken + 1
        for depth in range(max(depths)):
            if depth == len(self.drafted):
                self.drafted.append(0)
                self.accepted.append(0)
                self.reached.append(0)
            self.drafted[depth] += 1
            self.accepted[depth] += depth < taken
            self.reached[depth] += depth < asked
