"""The training loop.

A step depends only on the seed, its number and the state before it: a stopped run continues bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specengine.train.data.corpus import NumberedDialogue, steps_of
from specengine.train.loss_passes import Diverged, LossPasses
from specengine.train.objectives.level_report import LevelReport
from specengine.train.run_log import RunLog, held_out_entry, loss_entry
from specengine.train.run_state import load_state, save_state
from specengine.train.stop_signals import stop_signals

_SEED_STRIDE = 1_000_003  # between two steps
_BETAS = (0.9, 0.95)
_PREPARED = 4  # dialogues that an objective sees before the first step


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step.

    step: steps done.  tokens: learned in them.  line: of the log.  held_out: the last evaluation.
    """

    step: int
    steps: int
    tokens: int
    line: dict[str, Any]
    held_out: LevelReport | None


@dataclass(frozen=True)
class Outcome:
    """The end of a run. ended: finished, stopped (by a signal) or minutes (the time limit)."""

    ended: str
    step: int
    steps: int
    held_out: LevelReport | None


class Trainer:
    """Trains an objective, with checkpoints and a log in the folder `out`.

    about: settings that a run must share with the checkpoint it resumes.  weights: makes the network's first weights;
    None keeps the objective's own.  publish: called with the report and the tokens learned after each best evaluation.
    show: called after every step and evaluation.
    """

    def __init__(
        self,
        passes: LossPasses,
        out: Path,
        *,
        about: dict[str, Any],
        weights: Callable[[], dict[str, torch.Tensor]] | None = None,
        publish: Callable[[LevelReport, int], None],
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._passes = passes
        self._objective = passes.objective
        self._corpus = passes.corpus
        self._config = passes.config
        self._processes = passes.processes
        self._folder = out / "checkpoints"
        self._log_path = out / "training.jsonl"
        self._weights = weights
        self._about = {**about, "data": self._corpus.fingerprint}
        self._publish = publish
        self._show = show
        config, objective = self._config, self._objective
        self._plan = [
            group for epoch in range(config.epochs) for group in steps_of(self._corpus, epoch, config.batch_tokens)
        ]
        named = [(name, p) for name, p in objective.network.named_parameters() if p.requires_grad]
        self._rate = objective.learning_rate if config.learning_rate is None else config.learning_rate
        shares = {name: objective.rate_of(name) for name, _ in named}
        self._shares = list(dict.fromkeys(shares.values()))  # of the rate, by groups of parameters
        groups = [{"params": [p for name, p in named if shares[name] == share]} for share in self._shares]
        self._optimiser = torch.optim.AdamW(
            groups, lr=self._rate, betas=_BETAS, weight_decay=config.weight_decay, fused=True
        )
        self._step = 0
        self._tokens = 0
        self._best = 0.0
        self._saved: Path | None = None
        self._held_out: LevelReport | None = None

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return len(self._plan)

    def run(self) -> Outcome:
        """Trains to the end, to a signal or to the time limit, from the newest checkpoint if one exists.

        Raises ValueError for a checkpoint of another run, Diverged and MemoryError. The last two leave a checkpoint of
        the state before the failed step.
        """
        self._resume()
        if self._step == 0:
            self._objective.prepare(self._passes.batch(self._corpus.training[:_PREPARED]))
            self._load_first_weights()
        log = RunLog(self._log_path, self._step) if self._processes.rank == 0 else None
        begin = time.monotonic()
        try:
            with stop_signals() as signalled:
                return self._run(log, begin, signalled)
        finally:
            if log is not None:
                log.close()

    def _run(self, log: RunLog | None, begin: float, signalled: Callable[[], bool]) -> Outcome:
        config, steps = self._config, self.steps
        if not steps:
            self._evaluate(log)
        while self._step < steps:
            levels = self._train_step(self._plan[self._step])
            self._record(log, loss_entry(levels))
            last = self._step == steps
            ended = self._ended(begin, signalled)
            if last or self._step % config.evaluate_steps == 0 or ended == "minutes":
                self._evaluate(log)
            if last or self._step % config.save_steps == 0 or ended != "finished":
                self._save()
            if ended != "finished":
                return Outcome(ended, self._step, steps, self._held_out)
        return Outcome("finished", self._step, steps, self._held_out)

    def _ended(self, begin: float, signalled: Callable[[], bool]) -> str:
        late = 0 < self._config.minutes * 60 <= time.monotonic() - begin
        if self._processes.any(signalled()):
            return "stopped"
        return "minutes" if self._processes.any(late) else "finished"

    def _train_step(self, group: list[NumberedDialogue]) -> LevelReport:
        """Does a step; an error in its passes leaves the weights unchanged."""
        processes = self._processes
        torch.manual_seed(self._config.seed + _SEED_STRIDE * (self._step * processes.size + processes.rank))
        try:
            levels = self._passes.gradients(group)
        except (MemoryError, RuntimeError) as error:
            if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "memory" in str(error)):
                raise
            self._optimiser.zero_grad()
            self._save()
            raise MemoryError(
                f"training: out of memory in step {self._step + 1} with passes of {self._config.rows} rows; "
                f"resume from {self._saved} with fewer"
            ) from error
        except Diverged as error:
            self._optimiser.zero_grad()
            self._save()
            raise Diverged(
                f"training: {error} in step {self._step + 1}; resume from {self._saved} at a lower rate"
            ) from None
        for options, share in zip(self._optimiser.param_groups, self._shares, strict=True):
            options["lr"] = self._rate * share * self._config.rate(self._step, self.steps)
        self._optimiser.step()
        self._optimiser.zero_grad()
        self._step += 1
        self._tokens += self._corpus.wanted_tokens(group)
        return levels

    @torch.no_grad()
    def _evaluate(self, log: RunLog | None) -> None:
        self._held_out = self._passes.held_out()
        if self._held_out.tau > self._best:
            self._best = self._held_out.tau
            if self._processes.rank == 0:
                self._publish(self._held_out, self._tokens)
        self._record(log, {"held_out": held_out_entry(self._held_out)})

    def _record(self, log: RunLog | None, entry: dict[str, Any]) -> None:
        line = {"step": self._step, "tokens": self._tokens, **entry}
        if log is not None:
            log.write(line)
            self._show(Progress(self._step, self.steps, self._tokens, line, self._held_out))

    def _save(self) -> None:
        if self._processes.rank == 0:
            state = {
                "about": self._about,
                "step": self._step,
                "tokens": self._tokens,
                "best": self._best,
                "network": self._objective.network.state_dict(),
                "optimiser": self._optimiser.state_dict(),
            }
            self._saved = save_state(self._folder, self._step, state)

    def _load_first_weights(self) -> None:
        if self._weights is None:
            return
        try:
            self._objective.network.load_state_dict(self._weights())
        except RuntimeError as error:
            raise ValueError(f"start: the weights are of another network: {error}") from error

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
        self._step = state["step"]
        self._tokens = state["tokens"]
        self._best = state["best"]
