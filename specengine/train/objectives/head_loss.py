"""Soft cross-entropy through a head, without storing logits for the backward pass.

The forward pass computes the gradients too, a few hundred rows at a time. Logits of all rows and levels would take more
memory than the network itself.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_ROWS = 512  # whose logits exist at once


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, head, target_probs, counted, best):
        total = states.new_zeros((), dtype=torch.float32)
        ranked = []
        gradient = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        head_gradient = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for start in range(0, len(states), _ROWS):
            part = slice(start, start + _ROWS)
            logits = functional.linear(states[part], head).float()
            ranked.append(logits.topk(best).indices if best > 1 else logits.argmax(-1, keepdim=True))
            sums = logits.logsumexp(-1, keepdim=True)
            total += ((sums[:, 0] - torch.linalg.vecdot(target_probs[part], logits)) * counted[part]).sum()
            if any(ctx.needs_input_grad):
                change = logits.sub_(sums).exp_().sub_(target_probs[part]).mul_(counted[part, None]).to(head.dtype)
            if gradient is not None:
                gradient[part] = change @ head
            if head_gradient is not None:
                head_gradient.addmm_(change.T, states[part])
        ctx.gradients = gradient, head_gradient
        guesses = torch.cat(ranked) if ranked else torch.empty(0, best, dtype=torch.long, device=states.device)
        ctx.mark_non_differentiable(guesses)
        return total, guesses

    @staticmethod
    def backward(ctx, scale, _):
        own, head = (None if x is None else x * scale.to(x.dtype) for x in ctx.gradients)
        return own, head, None, None, None


def soft_cross_entropy(
    states: torch.Tensor, head: torch.Tensor, target_probs: torch.Tensor, counted: torch.Tensor, best: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums -target_probs . log_softmax(states head^T) over counted rows; also returns the best ids int64 [R, best].

    states: [R, C].  head: [V', C].  target_probs: float32 [R, V'], summing to 1.  counted: bool [R].
    """
    return _SoftCrossEntropy.apply(as_cast(states), as_cast(head), target_probs, counted.float(), best)


def as_cast(x: torch.Tensor) -> torch.Tensor:
    """Casts x to the dtype of autocast where that is on, so that a head is cast once for all levels."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
