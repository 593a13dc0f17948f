"""FastEagle's network and losses: N layers, each predicting one token further from the same row (sections 3 and 4).

Row t reads the target's features of position t and the embedding of token t + 1; layer i's output stands for the
target's last feature of position t + i, from which the target's own head predicts token t + i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from specengine.train.llama_layer import DecoderLayer, LayerShape


@dataclass(frozen=True)
class FastEagleLoss:
    """Weights: of soft cross-entropy and of SmoothL1 between features, its mean or sum over dimensions; the deepest
    layer counts 1, each above it `decay` less."""

    cross_entropy: float = 0.1
    feature: float = 1.0
    decay: float = 0.9
    feature_sum: bool = False


class FastEagle(nn.Module):
    """levels: N.  taps: target features of a position that are fused.  parallel: the layers read the same input instead
    of each other's output (the paper's ablation)."""

    def __init__(self, shape: LayerShape, levels: int, taps: int = 3, *, parallel: bool = False) -> None:
        super().__init__()
        size = shape.hidden_size
        self.fc_features = nn.Linear(taps * size, size, bias=False)
        self.fc_input = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(levels))
        self.parallel = parallel

    def forward(self, tapped: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        """N x [B, T, hidden] of tapped [B, T, taps, hidden] and the embeddings [B, T, hidden] of the next tokens."""
        positions = torch.arange(tapped.shape[1], device=tapped.device)
        x = first = self.fc_input(torch.cat([self.fc_features(tapped.flatten(2)), embedded], -1))
        states = []
        for layer in self.layers:
            x = layer(first if self.parallel else x, positions)
            states.append(x)
        return states


def fasteagle_loss(
    states: list[torch.Tensor],
    features: torch.Tensor,
    head: torch.Tensor,
    wanted: torch.Tensor,
    weights: FastEagleLoss,
) -> tuple[torch.Tensor, list[float]]:
    """The loss of one sequence, and per level how often the best token is the target's.

    states: N x [1, T, hidden].  features: [T, hidden], the target's, normed.  head: [V', hidden], the rows of its head
    in the drafter's vocabulary.  wanted: bool [T], whether the token after a position is one to learn.
    """
    levels, total, agreed = len(states), features.new_zeros(()), []
    with torch.no_grad():
        target_logits = functional.linear(features, head)
        target_probs = target_logits.softmax(-1)
    for i, state in enumerate(states, start=1):
        rows = wanted[i:].nonzero()[:, 0]
        if len(rows) == 0:
            agreed.append(float("nan"))
            continue
        ours, theirs = state[0, rows], features[rows + i]
        logits = functional.linear(ours, head)
        entropy = -(target_probs[rows + i] * logits.log_softmax(-1)).sum(-1).mean()
        distance = functional.smooth_l1_loss(ours, theirs, reduction="none")
        distance = (distance.sum(-1) if weights.feature_sum else distance.mean(-1)).mean()
        scale = weights.decay ** (levels - i)
        total = total + scale * (weights.cross_entropy * entropy + weights.feature * distance)
        with torch.no_grad():
            agreed.append((logits.argmax(-1) == target_logits[rows + i].argmax(-1)).float().mean().item())
    return total, agreed
