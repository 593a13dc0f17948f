"""The passes of a training run: gradients of a step and held-out losses, summed over batches and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields

import torch

from specengine.train.config import TrainConfig
from specengine.train.data.corpus import Corpus, NumberedDialogue, split
from specengine.train.data.dialogue_files import Dialogue
from specengine.train.data.target_states import TargetStates
from specengine.train.objectives.base import Objective
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.training_batch import TrainingBatch
from specengine.train.process_group import ProcessGroup

_MOST_LEVELS = 64


class Diverged(ValueError):
    """The loss or its gradient is not a finite number."""


class LossPasses:
    """Runs an objective over groups of dialogues. states: the target's states of a dialogue and its number."""

    def __init__(
        self,
        objective: Objective,
        corpus: Corpus,
        states: Callable[[int, Dialogue], TargetStates],
        config: TrainConfig,
        processes: ProcessGroup,
    ) -> None:
        self.objective = objective
        self.corpus = corpus
        self.config = config
        self.processes = processes
        self._states = states
        self._parameters = [p for p in objective.network.parameters() if p.requires_grad]

    def batch(self, dialogues: Sequence[NumberedDialogue]) -> TrainingBatch:
        """Makes one batch of some dialogues, on the device of this process."""
        return self.corpus.batch(dialogues, self._states, self.processes.device)

    def gradients(self, group: list[NumberedDialogue]) -> LevelReport:
        """Adds the clipped gradient of a group's mean loss to the parameters.

        Raises Diverged where the loss or the gradient is not finite.
        """
        wanted = self.corpus.wanted_tokens(group)
        total = torch.zeros((), dtype=torch.float64)
        levels = []
        for part in self._own_parts(group):
            with self._autocast():
                loss, report = self.objective.loss(self.batch(part))
            (loss / wanted).backward()
            total += loss.detach().cpu()
            levels.append(report)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.processes.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.clip or float("inf"))
        if not (self.processes.all_reduce(total).isfinite() and norm.isfinite()):
            raise Diverged("the loss is not a finite number")
        return self._summed(levels)

    @torch.no_grad()
    def held_out(self) -> LevelReport:
        """Evaluates the held-out dialogues."""
        self.objective.network.eval()
        levels = []
        for part in self._own_parts(self.corpus.held_out):
            with self._autocast():
                levels.append(self.objective.loss(self.batch(part))[1])
        self.objective.network.train()
        return self._summed(levels)

    def _own_parts(self, group: Sequence[NumberedDialogue]) -> list[list[NumberedDialogue]]:
        return split(group, self.config.rows)[self.processes.rank :: self.processes.size]

    def _summed(self, levels: list[LevelReport]) -> LevelReport:
        """Sums the reports of all processes; a process without a part learns the number of levels from the others."""
        own = torch.zeros(len(fields(LevelReport)), _MOST_LEVELS, dtype=torch.float64)
        for report in levels:
            columns = torch.stack([getattr(report, f.name) for f in fields(LevelReport)])
            own[:, : columns.shape[1]] += columns
        self.processes.all_reduce(own)
        used = int((own[1] > 0).sum())
        return LevelReport(*own[:, :used])

    def _autocast(self) -> AbstractContextManager:
        kind = self.processes.device.type
        asked = self.config.precision
        low = asked == "bfloat16" or (asked == "auto" and kind == "cuda")
        return torch.autocast(kind, torch.bfloat16, enabled=low)
