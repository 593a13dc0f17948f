"""The training loop. What a step does depends on the seed, its number and the state before it alone, so a run that was
stopped anywhere goes on bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from specengine.train.config import TrainConfig
from specengine.train.data.corpus import Corpus, Numbered, split, steps_of
from specengine.train.data.dialogues import Dialogue
from specengine.train.data.target_states import States
from specengine.train.objectives.base import LevelReport, Objective
from specengine.train.parallel import World
from specengine.train.run_log import RunLog, held_out_entry, loss_entry
from specengine.train.run_state import load_state, save_state
from specengine.train.stop_signals import stop_signals

_SEEDS = 1_000_003  # between two steps
_BETAS = (0.9, 0.95)
_PREPARED = 4  # dialogues that an objective sees first


@dataclass(frozen=True)
class Progress:
    """step: of steps done, `tokens` learned in them.  line: of the log.  held_out: the last evaluation."""

    step: int
    steps: int
    tokens: int
    line: dict[str, Any]
    held_out: LevelReport | None


@dataclass(frozen=True)
class Outcome:
    """ended: finished, stopped (by a signal) or minutes (are over)."""

    ended: str
    step: int
    steps: int
    held_out: LevelReport | None


class Diverged(ValueError):
    """The loss or its gradient is not a finite number."""


class Trainer:
    """about: what a run must have in common with the checkpoint it resumes.  weights: makes those of the network to
    begin with; None: the objective's own.  publish: told the held-out report, the
    tokens learned, whenever it is the best yet.  show: told of every step and evaluation."""

    def __init__(
        self,
        objective: Objective,
        corpus: Corpus,
        states: Callable[[int, Dialogue], States],
        config: TrainConfig,
        out: Path,
        world: World,
        *,
        about: dict[str, Any],
        weights: Callable[[], dict[str, torch.Tensor]] | None = None,
        publish: Callable[[LevelReport, int], None],
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._objective, self._corpus, self._states = objective, corpus, states
        self._config, self._world = config, world
        self._folder, self._log_path = out / "checkpoints", out / "training.jsonl"
        self._weights = weights
        self._about = {**about, "data": corpus.fingerprint}
        self._publish, self._show = publish, show
        self._plan = [group for epoch in range(config.epochs) for group in steps_of(corpus, epoch, config.batch_tokens)]
        named = [(name, p) for name, p in objective.network.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self._rate = objective.learning_rate if config.learning_rate is None else config.learning_rate
        shares = {name: objective.rate_of(name) for name, _ in named}
        self._shares = list(dict.fromkeys(shares.values()))  # of the rate, by groups of parameters
        groups = [{"params": [p for name, p in named if shares[name] == share]} for share in self._shares]
        self._optimiser = torch.optim.AdamW(
            groups, lr=self._rate, betas=_BETAS, weight_decay=config.weight_decay, fused=True
        )
        self._step, self._tokens, self._best = 0, 0, 0.0
        self._saved: Path | None = None
        self._held_out: LevelReport | None = None

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return len(self._plan)

    def run(self) -> Outcome:
        """Trains to the end, to a signal, or until the minutes are over, from the newest checkpoint if there is one.

        Raises ValueError for a checkpoint of another run, Diverged, and MemoryError; the last two leave a checkpoint of
        the state before the step that failed.
        """
        self._resume()
        if self._step == 0:
            some = self._corpus.batch(self._corpus.training[:_PREPARED], self._states, self._world.device)
            self._objective.prepare(some)
            self._begin()
        log = RunLog(self._log_path, self._step) if self._world.rank == 0 else None
        begin = time.monotonic()
        try:
            with stop_signals() as signalled:
                return self._run(log, begin, signalled)
        finally:
            if log is not None:
                log.close()

    def _run(self, log: RunLog | None, begin: float, signalled: Callable[[], bool]) -> Outcome:
        config, steps = self._config, self.steps
        while self._step < steps:
            levels = self._guarded(self._plan[self._step])
            self._tell(log, loss_entry(levels))
            last = self._step == steps
            late = 0 < config.minutes * 60 <= time.monotonic() - begin
            ended = "stopped" if self._world.any(signalled()) else "minutes" if self._world.any(late) else "finished"
            if last or self._step % config.evaluate_steps == 0 or ended == "minutes":
                self._evaluate(log)
            if last or self._step % config.save_steps == 0 or ended != "finished":
                self._save()
            if ended != "finished":
                return Outcome(ended, self._step, steps, self._held_out)
        return Outcome("finished", self._step, steps, self._held_out)

    def _guarded(self, group: list[Numbered]) -> LevelReport:
        """A step; what can go wrong in its passes leaves the weights as they were."""
        torch.manual_seed(self._config.seed + _SEEDS * (self._step * self._world.size + self._world.rank))
        try:
            levels = self._gradients(group)
        except (MemoryError, RuntimeError) as error:
            if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "memory" in str(error)):
                raise
            self._optimiser.zero_grad()
            self._save()
            raise MemoryError(
                f"training: out of memory in step {self._step + 1} with passes of {self._config.rows} rows; "
                f"go on from {self._saved} with fewer"
            ) from error
        except Diverged as error:
            self._optimiser.zero_grad()
            self._save()
            raise Diverged(
                f"training: {error} in step {self._step + 1}; go on from {self._saved} at a lower rate"
            ) from None
        for options, share in zip(self._optimiser.param_groups, self._shares, strict=True):
            options["lr"] = self._rate * share * self._config.rate(self._step, self.steps)
        self._optimiser.step()
        self._optimiser.zero_grad()
        self._step += 1
        self._tokens += self._corpus.wanted_tokens(group)
        return levels

    def _gradients(self, group: list[Numbered]) -> LevelReport:
        wanted, total, levels = self._corpus.wanted_tokens(group), torch.zeros((), dtype=torch.float64), []
        for part in split(group, self._config.rows)[self._world.rank :: self._world.size]:
            with self._cast():
                loss, report = self._objective.loss(self._corpus.batch(part, self._states, self._world.device))
            (loss / wanted).backward()
            total += loss.detach().cpu()
            levels.append(report)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._world.add_up(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.clip or float("inf"))
        if not (self._world.add_up(total).isfinite() and norm.isfinite()):
            raise Diverged("the loss is not a finite number")
        return self._summed(levels)

    def _summed(self, levels: list[LevelReport]) -> LevelReport:
        """The sum of all processes' reports; one that had no part learns the number of levels from the others."""
        own = torch.zeros(len(fields(LevelReport)), 64, dtype=torch.float64)
        for report in levels:
            columns = torch.stack([getattr(report, f.name) for f in fields(LevelReport)])
            own[:, : columns.shape[1]] += columns
        self._world.add_up(own)
        used = int((own[1] > 0).sum())
        return LevelReport(*own[:, :used])

    @torch.no_grad()
    def _evaluate(self, log: RunLog | None) -> None:
        self._objective.network.eval()
        levels = []
        for part in split(self._corpus.held_out, self._config.rows)[self._world.rank :: self._world.size]:
            with self._cast():
                batch = self._corpus.batch(part, self._states, self._world.device)
                levels.append(self._objective.loss(batch)[1])
        self._objective.network.train()
        self._held_out = self._summed(levels)
        if self._held_out.tau > self._best:
            self._best = self._held_out.tau
            if self._world.rank == 0:
                self._publish(self._held_out, self._tokens)
        self._tell(log, {"held_out": held_out_entry(self._held_out)})

    def _cast(self) -> AbstractContextManager:
        kind, asked = self._world.device.type, self._config.precision
        low = asked == "bfloat16" or (asked == "auto" and kind == "cuda")
        return torch.autocast(kind, torch.bfloat16, enabled=low)

    def _tell(self, log: RunLog | None, entry: dict[str, Any]) -> None:
        line = {"step": self._step, "tokens": self._tokens, **entry}
        if log is not None:
            log.write(line)
            self._show(Progress(self._step, self.steps, self._tokens, line, self._held_out))

    def _save(self) -> None:
        if self._world.rank == 0:
            state = {
                "about": self._about,
                "step": self._step,
                "tokens": self._tokens,
                "best": self._best,
                "network": self._objective.network.state_dict(),
                "optimiser": self._optimiser.state_dict(),
            }
            self._saved = save_state(self._folder, self._step, state)

    def _begin(self) -> None:
        if self._weights is None:
            return
        try:
            self._objective.network.load_state_dict(self._weights())
        except RuntimeError as error:
            raise ValueError(f"start: it is of another network: {error}") from error

    def _resume(self) -> None:
        state = load_state(self._folder)
        if state is None:
            return
        there = state["about"]
        if different := sorted(key for key in self._about if there.get(key) != self._about[key]):
            was, expected = ({key: about.get(key) for key in different} for about in (there, self._about))
            raise ValueError(f"out: {self._folder.parent} holds another run: {was}, expected {expected}")
        self._objective.network.load_state_dict(state["network"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._step, self._tokens, self._best = state["step"], state["tokens"], state["best"]
