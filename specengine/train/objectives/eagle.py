"""Trains EAGLE-1 and -2: from a hidden state and the next token to the next hidden state (section 4.2).

Row t reads the target's hidden state of position t and the embedding of token t + 1. Its output predicts the hidden
state of position t + 1, from which the target's own head guesses token t + 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specengine.rules.base import check_number
from specengine.train.objectives.base import Objective
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.llama_layer import DecoderLayer, LayerShape
from specengine.train.objectives.soft_targets import SoftTargets
from specengine.train.objectives.target_layers import layer_json, shape_of, start_from
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch, ahead
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Options:
    """Options of `eagle`.

    layers: of the drafter.  feature, cross_entropy: weights of the loss between hidden states and of the soft loss.
    noise: width of the uniform noise on hidden states for a text of 512 tokens; shorter texts get more.
    warm_start: layers start as the target's last ones.
    """

    layers: int = 1
    feature: float = 1.0
    cross_entropy: float = 0.1
    noise: float = 0.2
    bias: bool = True
    warm_start: bool = True

    def __post_init__(self) -> None:
        check_range("layers", self.layers, 1, 32)
        for name in ("feature", "cross_entropy", "noise"):
            check_number(name, getattr(self, name), 0, 1000)


class Eagle(nn.Module):
    """EAGLE's network; the first layer has no norm before its attention."""

    def __init__(self, shape: LayerShape, layers: int = 1, *, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=bias)
        self.layers = nn.ModuleList(DecoderLayer(shape, input_norm=i > 0) for i in range(layers))

    def forward(self, hidden_states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Predicts the next hidden states [B, T, hidden].

        hidden_states: [B, T, hidden].  embedded: [B, T, hidden], the embeddings of the next tokens.
        """
        x = self.fc(torch.cat([embedded, hidden_states], -1))
        positions = torch.arange(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, positions)
        return x


class EagleObjective(Objective):
    """SmoothL1 between hidden states, and soft cross-entropy through the target's head."""

    name = "eagle"
    options_type = Options
    network: Eagle

    def __init__(self, target: TargetWeights, options: Options) -> None:
        self.target = target
        self.options = options
        self.network = Eagle(shape_of(target.config), options.layers, bias=options.bias).to(target.head.device)
        # Embeddings are far smaller than hidden states; export() multiplies the factor into fc.
        self._scale = 1 / target.embedding.square().mean().sqrt().item()
        if options.warm_start:
            first = target.config.num_layers - options.layers
            for i, layer in enumerate(self.network.layers):
                start_from(layer, target, max(0, first + i))

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        options = self.options
        hidden_states = self._noisy(batch) if torch.is_grad_enabled() else batch.last
        states = self.network(hidden_states, self.target.embed(ahead(batch.tokens, 1)) * self._scale)
        entropy, guesses = SoftTargets(batch, self.target).compare(1, states, self.target.head)
        learnt = ahead(batch.wanted, 1)
        distance = functional.smooth_l1_loss(
            states[learnt].float(), ahead(batch.last, 1)[learnt], reduction="none"
        ).mean(-1)
        total = options.cross_entropy * entropy + options.feature * distance.sum()
        return total, LevelReport.of([total], [guesses], batch)

    def _noisy(self, batch: TrainingBatch) -> torch.Tensor:
        width = self.options.noise * 512 / batch.lengths
        return batch.last + (torch.rand_like(batch.last) - 0.5) * width[:, None, None]

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective; the drafter shares the target's whole head: no published reader supports a part of it."""
        tensors = {name: x.detach().clone() for name, x in self.network.state_dict().items()}
        tensors["fc.weight"][:, : self.target.config.hidden_size] *= self._scale
        json = layer_json(self.target.config, self.options.layers, "LlamaForCausalLMEagle")
        return json | {"bias": self.options.bias}, tensors

    def adopted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Objective."""
        fc = tensors["fc.weight"].clone()
        fc[:, : self.target.config.hidden_size] /= self._scale
        return super().adopted(tensors | {"fc.weight": fc})
