"""Trains Medusa-1: heads on the target's last hidden state, each of which guesses one token further (section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specengine.rules.base import check_number
from specengine.train.objectives.base import Objective, discounted
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.soft_targets import SoftTargets
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Options:
    """Options of `medusa`.

    heads: number of levels.  decay: weight of a head relative to the head before.  soft: learn the target's
    distribution, else the token of the text.  own_head: every head has its own output matrix, else all share the
    target's.
    """

    heads: int = 4
    decay: float = 0.8
    soft: bool = True
    own_head: bool = False

    def __post_init__(self) -> None:
        check_range("heads", self.heads, 1, 16)
        check_number("decay", self.decay, 0, 1)


class ResBlock(nn.Module):
    """x + SiLU(Wx + b); it starts as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.linear(x))


class MedusaObjective(Objective):
    """Discounted cross-entropy of all heads."""

    name = "medusa"
    options_type = Options
    learning_rate = 1e-3

    def __init__(self, target: TargetWeights, options: Options) -> None:
        self.target = target
        self.options = options
        self._heads = [self._head() for _ in range(options.heads)]
        self.network = nn.ModuleList(self._heads).to(target.head.device)

    def _head(self) -> nn.Sequential:
        size = self.target.config.hidden_size
        block = ResBlock(size)
        if not self.options.own_head:
            return nn.Sequential(block)
        output = nn.Linear(size, len(self.target.head), bias=False)
        with torch.no_grad():
            output.weight.copy_(self.target.head)
        return nn.Sequential(block, output)

    def _matrix(self, head: nn.Sequential) -> torch.Tensor:
        return head.get_parameter("1.weight") if len(head) > 1 else self.target.head

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        targets = SoftTargets(batch, self.target, hard=not self.options.soft)
        compared = [
            targets.compare(level, head[0](batch.last), self._matrix(head))
            for level, head in enumerate(self._heads, start=1)
        ]
        losses, guesses = zip(*compared, strict=True)
        return discounted(losses, self.options.decay), LevelReport.of(losses, guesses, batch)

    def vocabulary_rows(self) -> list[str]:
        """See Objective."""
        return [f"{i}.1.weight" for i, head in enumerate(self._heads) if len(head) > 1]

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective; tensors are `{i}.0.linear` and, with own_head, `{i}.1`."""
        json = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": self.options.heads,
            "medusa_num_layers": 1,
            "hidden_size": self.target.config.hidden_size,
            "vocab_size": self.target.config.vocab_size,
            "draft_vocab_size": len(self.target.head),
        }
        tensors = {name: x.detach() for name, x in self.network.state_dict().items()}
        return json, tensors | self.target.vocabulary_tensors()
