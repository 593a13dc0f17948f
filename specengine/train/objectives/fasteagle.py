"""Trains FastEagle: N layers, each of which guesses one token further from the same row (sections 3 and 4).

Row t reads the target's hidden states of position t and the embedding of token t + 1. The output of layer i predicts
the target's last hidden state of position t + i, from which the target's own head guesses token t + i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specengine.models.config import ModelConfig
from specengine.rules.base import check_number
from specengine.train.objectives.base import Objective
from specengine.train.objectives.head_loss import as_cast, soft_cross_entropy
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.llama_layer import DecoderLayer, LayerShape, RMSNorm
from specengine.train.objectives.target_layers import layer_json, low_middle_high, shape_of
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch, ahead
from specengine.utils.spec_string import check_range

STARTS = ("first", "last", "random")


@dataclass(frozen=True)
class FastEagleOptions:
    """Options of `fasteagle`.

    levels: N.  cross_entropy, feature: weights of soft cross-entropy and of SmoothL1 between hidden states.
    feature_sum: SmoothL1 is summed over dimensions, else averaged.  decay: the deepest layer has weight 1, each other
    layer `decay` times the weight of the next deeper one.
    parallel: all layers read the same input instead of each other's output (the paper's ablation).
    norm: a trained norm between the layers' outputs and the head.
    start: layers start as the target's first or last ones, or at random.
    """

    levels: int = 4
    cross_entropy: float = 0.1
    feature: float = 1.0
    decay: float = 0.9
    feature_sum: bool = False
    parallel: bool = False
    norm: bool = True
    start: str = "first"

    def __post_init__(self) -> None:
        check_range("levels", self.levels, 1, 16)
        for name in ("cross_entropy", "feature", "decay"):
            check_number(name, getattr(self, name), 0, 1000)
        if self.start not in STARTS:
            raise ValueError(f"start: expected {', '.join(STARTS)}, got {self.start!r}")


class FastEagleNetwork(nn.Module):
    """FastEagle's network.

    fused: number of hidden states of a position to fuse; each has a norm, because their scales differ twentyfold.
    """

    def __init__(
        self, shape: LayerShape, levels: int, fused: int, *, parallel: bool = False, norm: bool = True
    ) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(fused))
        self.fc_features = nn.Linear(fused * size, size, bias=False)
        self.fc_input = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(levels))
        self.norm = RMSNorm(size, eps) if norm else nn.Identity()
        self.parallel = parallel

    def forward(self, at_layers: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        """Predicts N x [B, T, hidden].

        at_layers: [B, T, fused, hidden].  embedded: [B, T, hidden], the embeddings of the next tokens.
        """
        positions = torch.arange(at_layers.shape[1], device=at_layers.device)
        normed = torch.cat([norm(at_layers[:, :, i]) for i, norm in enumerate(self.fc_norm)], -1)
        x = first = self.fc_input(torch.cat([self.fc_features(normed), embedded], -1)).float()
        states = []
        for layer in self.layers:
            x = layer(first if self.parallel else x, positions)
            states.append(self.norm(x))
        return states


class FastEagleObjective(Objective):
    """The multi-level loss: per level soft cross-entropy, and SmoothL1 to the target's hidden state."""

    name = "fasteagle"
    options_type = FastEagleOptions
    network: FastEagleNetwork

    def __init__(self, target: TargetWeights, options: FastEagleOptions) -> None:
        c = target.config
        self.target = target
        self.options = options
        self.hidden_state_layers = low_middle_high(c)
        self.network = FastEagleNetwork(
            shape_of(c), options.levels, len(self.hidden_state_layers), parallel=options.parallel, norm=options.norm
        )
        # Embeddings are far smaller than hidden states; export() multiplies the factor into fc_input.
        self._scale = 1 / target.embedding.square().mean().sqrt().item()
        if options.start != "random":
            self._start_as_target(0 if options.start == "first" else max(0, c.num_layers - options.levels))
        self.network.to(target.embedding.device)

    @classmethod
    def check(cls, config: ModelConfig, options: FastEagleOptions) -> None:
        """See Objective."""
        low_middle_high(config)

    @torch.no_grad()
    def _start_as_target(self, first: int) -> None:
        """Copies the target's layers from `first` on.

        If these are its lowest layers, they also read the embedding of the next token, as in the target.
        """
        c = self.target.config
        network = self.network
        for i, layer in enumerate(network.layers):
            index = min(first + i, c.num_layers - 1)
            for name, parameter in layer.named_parameters():
                parameter.copy_(self.target.read(f"model.layers.{index}.{name}"))
        if isinstance(network.norm, RMSNorm):
            network.norm.weight.copy_(self.target.read("model.norm.weight"))
        if first == 0:
            network.fc_input.weight[:, : c.hidden_size] *= 1 / self._scale
            network.fc_input.weight[:, c.hidden_size :] = torch.eye(c.hidden_size) / self._scale

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        options = self.options
        width = batch.tokens.shape[1]
        embedded = self.target.embed(ahead(batch.tokens, 1)) * self._scale
        states = self.network(batch.at_layers, embedded)
        learned = batch.wanted.flatten().nonzero()[:, 0]  # rows whose hidden states are predicted
        theirs = batch.last.flatten(0, 1)[learned]
        with torch.no_grad():
            target_probs = self.target.logits(theirs).float().softmax(-1)
        head = as_cast(self.target.head)
        total = theirs.new_zeros(())
        losses, ranked = [], []
        for i, state in enumerate(states, start=1):
            counted = learned % width >= i
            rows = torch.where(counted, learned - i, 0)
            ours = state.flatten(0, 1)[rows]
            best = 1 if torch.is_grad_enabled() else LevelReport.NEAR
            entropy, guesses = soft_cross_entropy(ours, head, target_probs, counted, best)
            distance = functional.smooth_l1_loss(ours.float(), theirs, reduction="none")
            distance = distance.sum(-1) if options.feature_sum else distance.mean(-1)
            level = options.cross_entropy * entropy + options.feature * (distance * counted).sum()
            total = total + options.decay ** (options.levels - i) * level
            losses.append(level)
            own = batch.tokens.new_full((batch.tokens.numel(), best), -1)
            own[rows[counted]] = self.target.target_ids(guesses[counted])
            ranked.append(own.unflatten(0, batch.tokens.shape))
        return total, LevelReport.of(losses, ranked, batch)

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective."""
        c = self.target.config
        tensors = {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}
        tensors["fc_input.weight"][:, c.hidden_size :] *= self._scale
        config = {
            **layer_json(c, self.options.levels, "FastEagleDraftModel"),
            "draft_vocab_size": len(self.target.head),
            "target_hidden_size": c.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.hidden_state_layers),
            "parallel": self.options.parallel,
        }
        return config, tensors | self.target.vocabulary_tensors()

    def adopted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Objective."""
        fc_input = tensors["fc_input.weight"].clone()
        fc_input[:, self.target.config.hidden_size :] /= self._scale
        return super().adopted(tensors | {"fc_input.weight": fc_input})
