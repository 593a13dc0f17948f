"""The losses of block drafters, a few hundred guesses at a time, because logits of all would take too much memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_ROWS = 512  # whose logits exist at once


@dataclass(frozen=True)
class LossShares:
    """The weights of a guess's losses, each zero or more.

    text: cross-entropy to the token of the text.  soft: cross-entropy to the target's distribution.
    distance: the L1 distance of both distributions.  confidence: binary cross-entropy of the confidence head to one
    minus half of that distance, which is the chance of acceptance.
    """

    text: float
    soft: float
    distance: float
    confidence: float


@dataclass(frozen=True)
class Guesses:
    """R guesses to learn.

    read: [R, columns], what the matrix of the head multiplies.  last: [R, C], the target's normed states before the
    guessed tokens.  labels: int64 [R], draft ids of the guessed tokens, -1 outside the vocabulary.
    confidence: [R], logits of the confidence head, or None.
    """

    read: torch.Tensor
    last: torch.Tensor
    labels: torch.Tensor
    confidence: torch.Tensor | None = None

    def part(self, part: slice) -> tuple[torch.Tensor | None, ...]:
        """Returns all four for some guesses."""
        every = (self.read, self.last, self.labels, self.confidence)
        return tuple(None if x is None else x[part] for x in every)


def block_loss(
    guesses: Guesses,
    matrix: torch.Tensor,
    target_logits: Callable[[torch.Tensor], torch.Tensor],
    shares: LossShares,
    best: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the losses [R], and the best draft ids int64 [R, best].

    matrix: [V', columns].  target_logits: of states [.., C], in the drafter's vocabulary.
    """

    def losses(read, last, labels, confidence):
        logits = functional.linear(read, matrix).float()
        ours = logits.log_softmax(-1)
        with torch.no_grad():
            theirs = target_logits(last).float().softmax(-1)
        known = labels >= 0
        total = ours.new_zeros(len(read))
        if shares.text:
            total = total - shares.text * known * ours.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        if shares.soft:
            total = total - shares.soft * known * torch.linalg.vecdot(theirs, ours)
        if shares.distance or confidence is not None:
            distance = (ours.exp() - theirs).abs().sum(-1)
            total = total + shares.distance * known * distance
            if confidence is not None:
                accepted = 1 - distance.detach() / 2
                total = total + shares.confidence * known * functional.binary_cross_entropy_with_logits(
                    confidence.float(), accepted, reduction="none"
                )
        return total, logits.detach().topk(min(best, len(matrix))).indices

    parts = [guesses.part(slice(start, start + _ROWS)) for start in range(0, len(guesses.read), _ROWS)]
    if not parts:
        return guesses.read.new_zeros(0), guesses.labels.new_zeros(0, min(best, len(matrix)))
    found = [checkpoint(losses, *part, use_reentrant=False) for part in parts]
    return torch.cat([loss for loss, _ in found]), torch.cat([ranked for _, ranked in found])
