"""Draws the children of tree nodes from the draft's distributions.

Shapes: R rows, V vocabulary, M nodes of a TreeBatch.
"""

from __future__ import annotations

import numpy as np
import torch

from specengine.ops.noise import philox4x32
from specengine.ops.verify_tree import SamplingTable, TokenHistory, target_probs_reference
from specengine.tree import TreeBatch

DRAFT_STREAM = 4  # apart from the target's: the output would lean towards the draft


def draw_siblings(
    logits: torch.Tensor,
    nodes: torch.Tensor,
    tree: TreeBatch,
    sequences: torch.Tensor,
    params: SamplingTable,
    history: TokenHistory,
    count: int,
    replacement: bool,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens int32 [R, count], -1 where a distribution has no further token.

    logits: float32 [R, V], row r of the children of node nodes[r] of sequence sequences[r] (int32 [R] each).
    tree: as far as it has grown.  replacement: whether a token may be drawn twice.
    """
    if index is not None:
        raise ValueError("index: a reduced vocabulary is not served here")
    params, history = params.to(torch.device("cpu")), history.to(torch.device("cpu"))
    starts, tokens, parents = (t.tolist() for t in (tree.row_start, tree.tokens, tree.parents))
    drawn = torch.full((len(logits), count), -1, dtype=torch.int32)
    for row, (node, b) in enumerate(zip(nodes.tolist(), sequences.tolist(), strict=True)):
        path, at = [], node
        while at > 0:
            path.append(tokens[starts[b] + at])
            at = parents[starts[b] + at]
        text = [*history.tokens[b, : int(history.length[b])].tolist(), *reversed(path)]
        probs = target_probs_reference(logits[row].double().cpu(), params, b, text, int(history.prompt_length[b]))
        draws = count if replacement else 1
        noise = _gumbel(int(params.seed[b]), len(text), len(probs), [node * draws + i for i in range(draws)])
        scores = probs.log().numpy() + noise
        best = scores.argmax(axis=1) if replacement else np.argsort(-scores[0], kind="stable")[:count]
        drawn[row, : len(best)] = torch.from_numpy(np.where(probs.numpy()[best] > 0, best, -1))
    return drawn.to(logits.device)


def _gumbel(seed: int, position: int, vocab: int, salts: list[int]) -> np.ndarray:
    """Standard Gumbel numbers, float64 [salts, vocab]; nodes of one position differ by their salt."""
    counter = np.zeros((len(salts) * vocab, 4), dtype=np.uint32)
    counter[:, 0] = np.tile(np.arange(vocab), len(salts))
    counter[:, 1], counter[:, 2], counter[:, 3] = position, DRAFT_STREAM, np.repeat(salts, vocab)
    bits = philox4x32(seed, counter)[:, 0].reshape(len(salts), vocab)
    return -np.log(-np.log((bits + 0.5) * 2.0**-32))
