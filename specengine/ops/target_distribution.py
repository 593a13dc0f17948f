"""The distribution of a node and the token drawn from it, in PyTorch: the reference of the ops that sample.

The native code is in csrc/cpu/thread_sampler.h and csrc/cuda/sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.ops import noise
from specengine.ops.sampling_table import SamplingTable


def draw_reference(
    scores: torch.Tensor,
    params: SamplingTable,
    b: int,
    tokens: Sequence[int],
    prompt: int,
    allowed: torch.Tensor | None = None,
) -> int:
    """The token drawn at one node from float64 scores [V].

    tokens: the committed ones, of which the first `prompt` are the prompt's, then those on the node's path.
    allowed: bool [V], the tokens that the node's mask allows.
    """
    probs = target_probs_reference(scores, params, b, tokens, prompt, allowed)
    if float(params.temperature[b]) == 0:
        return int(probs.argmax())  # torch takes the lowest index of equal maxima
    return noise.draw(probs, seed=int(params.seed[b]), position=len(tokens))


def target_probs_reference(
    scores: torch.Tensor,
    params: SamplingTable,
    b: int,
    tokens: Sequence[int],
    prompt: int,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution at one node after mask and sampling parameters, float64 [V]; one-hot at temperature 0."""
    scores = scores.clone() if allowed is None else torch.where(allowed, scores, -torch.inf)
    bias = slice(int(params.bias_start[b]), int(params.bias_start[b + 1]))
    for token, value in zip(params.bias_tokens[bias].tolist(), params.bias_values[bias].tolist(), strict=True):
        scores[token] += value
    repetition = float(params.repetition_penalty[b])
    for token in set(tokens):
        count = list(tokens[prompt:]).count(token)
        scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
        scores[token] -= float(params.frequency_penalty[b]) * count
        scores[token] -= float(params.presence_penalty[b]) * (count > 0)
    temperature = float(params.temperature[b])
    if temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    weights = (scores / temperature).softmax(dim=-1)
    order = scores.argsort(descending=True, stable=True)  # equal scores: lower token first
    keep = torch.ones_like(weights, dtype=torch.bool)
    top_k, top_p, min_p = int(params.top_k[b]), float(params.top_p[b]), float(params.min_p[b])
    if 0 < top_k < len(scores):
        keep[order[top_k:]] = False
    if top_p < 1:
        kept = torch.where(keep, weights, 0)[order]
        before = kept.cumsum(0) - kept  # mass of the more likely tokens
        keep[order[before >= top_p * kept.sum()]] = False
    keep &= weights >= min_p * weights.max()
    weights = torch.where(keep, weights, 0)
    return weights / weights.sum()
