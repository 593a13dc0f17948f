"""The interface of a drafter's training: a network, its loss and its export.

In all objectives, level i = 1, 2, ... of row t guesses token t + i + 1. It has read tokens up to t + 1 and the target's
hidden states up to position t, as in a cycle whose root is token t + 1. The target's own answer is `greedy[t + i]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from specengine.models.config import ModelConfig
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch


class Objective(ABC):
    """One drafter's network and loss. A subclass is made with (target, options: an instance of its options_type).

    name: as in --drafter.  options_type: a frozen dataclass that checks its ranges.  learning_rate: the default.
    target: the weights that the drafter shares.
    network: all trained parameters, in plain PyTorch under the names of published checkpoints.
    hidden_state_layers: layers of the target whose input it reads.  kv_layers: layers whose keys and values it reads.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Any]]
    learning_rate: ClassVar[float] = 5e-5
    target: TargetWeights
    network: nn.Module
    hidden_state_layers: tuple[int, ...] = ()
    kv_layers: tuple[int, ...] = ()

    @abstractmethod
    def __init__(self, target: TargetWeights, options: Any) -> None:
        """Makes the network at its start."""

    @classmethod
    def check(cls, config: ModelConfig, options: Any) -> None:
        """Raises ValueError for a target that it cannot learn from; it is called before any data is made."""
        return None

    def prepare(self, batch: TrainingBatch) -> None:
        """Sees some dialogues before the first step of a run, the same ones in every process."""
        return None

    def rate_of(self, name: str) -> float:
        """Returns the factor on the run's learning rate for a parameter of the network."""
        return 1.0

    def vocabulary_rows(self) -> list[str]:
        """Lists the network's tensors that have a row per token of the drafter's vocabulary."""
        return [name for name in self.network.state_dict() if name.endswith("lm_head.weight")]

    def adopted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Converts tensors of export() to a state of the network: the inverse of export(). It follows prepare()."""
        return {name: tensors.get(name, own) for name, own in self.network.state_dict().items()}

    def translated(self, json: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
        """Maps names of export() to the names under which another drafter has the same tensors.

        A name that is missing here keeps the network's own start. json, names: config.json of the other drafter, and
        the tensors it has.
        """
        return {name: name for name in self.export()[1]}

    @abstractmethod
    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """Computes the weighted loss summed over rows, and the report.

        The trainer divides the loss by the wanted tokens of a step.
        """

    @abstractmethod
    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Returns config.json and the tensors of the published layout, floats in their trained dtype."""


def discounted(losses: Sequence[torch.Tensor], decay: float) -> torch.Tensor:
    """Sums the losses of all levels, each weighted `decay` times the level above."""
    return sum((decay**i * loss for i, loss in enumerate(losses)), losses[0].new_zeros(()))
