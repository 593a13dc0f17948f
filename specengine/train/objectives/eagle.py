"""EAGLE-1's and -2's network and loss: from a feature and the token behind it to the next feature (section 4.2).

Row t reads the target's feature of position t and the embedding of token t + 1; its output stands for the feature of
position t + 1, from which the target's own head tells token t + 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specengine.rules.base import check_number
from specengine.train.objectives.base import Frozen, LevelReport, Objective, TrainingBatch, ahead
from specengine.train.objectives.llama_layer import DecoderLayer, LayerShape
from specengine.train.objectives.soft_targets import SoftTargets
from specengine.train.objectives.target_layers import layer_json, shape_of, start_from
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Options:
    """layers: of the drafter.  feature, cross_entropy: weights of the two losses.  noise: width of the uniform noise on
    features, for a text of 512 tokens; shorter ones get more.  warm_start: layers begin as the target's last ones."""

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
    """The first layer has no norm before its attention."""

    def __init__(self, shape: LayerShape, layers: int = 1, *, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=bias)
        self.layers = nn.ModuleList(DecoderLayer(shape, input_norm=i > 0) for i in range(layers))

    def forward(self, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden] of features and of the embeddings of the next tokens, [B, T, hidden] each."""
        x = self.fc(torch.cat([embedded, features], -1))
        positions = torch.arange(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, positions)
        return x


class EagleObjective(Objective):
    """SmoothL1 between features and a little soft cross-entropy through the target's head."""

    name = "eagle"
    options_type = Options
    network: Eagle

    def __init__(self, frozen: Frozen, options: Options) -> None:
        self.frozen, self.options = frozen, options
        self.network = Eagle(shape_of(frozen.config), options.layers, bias=options.bias).to(frozen.head.device)
        # The table's rows are far smaller than features; the factor goes into fc when it is stored.
        self._scale = 1 / frozen.embedding.square().mean().sqrt().item()
        if options.warm_start:
            first = frozen.config.num_layers - options.layers
            for i, layer in enumerate(self.network.layers):
                start_from(layer, frozen, max(0, first + i))

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        options = self.options
        features = self._noisy(batch) if torch.is_grad_enabled() else batch.last
        states = self.network(features, self.frozen.embed(ahead(batch.tokens, 1)) * self._scale)
        entropy, guesses = SoftTargets(batch, self.frozen).compare(1, states, self.frozen.head)
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
        """See Objective; embedding and head are the target's, all of it: no published reader knows of a part."""
        tensors = {name: x.detach().clone() for name, x in self.network.state_dict().items()}
        tensors["fc.weight"][:, : self.frozen.config.hidden_size] *= self._scale
        json = layer_json(self.frozen.config, self.options.layers, "LlamaForCausalLMEagle")
        return json | {"bias": self.options.bias}, tensors

    def adopted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Objective."""
        fc = tensors["fc.weight"].clone()
        fc[:, : self.frozen.config.hidden_size] /= self._scale
        return super().adopted(tensors | {"fc.weight": fc})
