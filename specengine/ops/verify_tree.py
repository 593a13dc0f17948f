"""Verification: walks the drafted trees with the target's logits.

Shapes: M rows (nodes of all requests), B requests, V vocabulary, N columns of a path, T columns of the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specengine import _C
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.ops import noise
from specengine.rules.base import Rule
from specengine.rules.lossless import Match
from specengine.types import SamplingParams


@dataclass(frozen=True)
class SamplingTable:
    """The sampling parameters of a batch as tensors, one entry per request; see SamplingParams for what they mean."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    seed: torch.Tensor
    bias_start: torch.Tensor
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams], seeds: Sequence[int]) -> SamplingTable:
        """seeds: one per request (the request's seed, or seed + i for its sample i)."""
        biases = [dict(p.logit_bias or {}) for p in params]

        def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype)

        return SamplingTable(
            temperature=column("temperature"),
            top_k=column("top_k", torch.int32),
            top_p=column("top_p"),
            min_p=column("min_p"),
            repetition_penalty=column("repetition_penalty"),
            presence_penalty=column("presence_penalty"),
            frequency_penalty=column("frequency_penalty"),
            seed=torch.tensor(list(seeds), dtype=torch.int64),
            bias_start=torch.tensor([0, *(len(b) for b in biases)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            bias_tokens=torch.tensor([t for b in biases for t in b], dtype=torch.int32),
            bias_values=torch.tensor([v for b in biases for v in b.values()], dtype=torch.float32),
        )

    def to(self, device: torch.device) -> SamplingTable:
        return SamplingTable(*(column.to(device) for column in self.columns()))

    def columns(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of the fields, as the ops take them."""
        return tuple(vars(self).values())


@dataclass(frozen=True)
class TokenHistory:
    """Committed tokens. tokens: int32 [B, T].  length: int32 [B], root included.  prompt_length: int32 [B]."""

    tokens: torch.Tensor
    length: torch.Tensor
    prompt_length: torch.Tensor

    @staticmethod
    def of(texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], columns: int) -> TokenHistory:
        """texts: committed tokens, the first of them the prompt's.  columns: room for as many."""
        tokens = np.zeros((len(texts), columns), dtype=np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        return TokenHistory(
            tokens=torch.from_numpy(tokens),
            length=torch.tensor([len(text) for text in texts], dtype=torch.int32),
            prompt_length=torch.tensor(list(prompt_lengths), dtype=torch.int32),
        )

    def to(self, device: torch.device) -> TokenHistory:
        return TokenHistory(*(column.to(device) for column in self.columns()))

    def columns(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of the fields, as the ops take them."""
        return tuple(vars(self).values())


@dataclass(frozen=True)
class Accepted:
    """What a cycle committed. path: int32 [B, N], node indices, root first, then -1.
    path_length: int32 [B], root included, so also the number of tokens committed.  bonus: int32 [B].
    relaxed: int32 [B], accepted tokens that the exact rule would have refused."""

    path: torch.Tensor
    path_length: torch.Tensor
    bonus: torch.Tensor
    relaxed: torch.Tensor


class VerifyWorkspace:
    """Scratch of verify_tree for a batch size: scores float32 [B, V] and counts int32 [B, V], on CUDA zero between
    calls; row_states int64 [R, 34] for up to R rows of logits, which only CUDA needs; weights int64 [B, 4, V], where a
    rule other than `match` is to be served."""

    def __init__(
        self, batch: int, vocab: int, *, device: torch.device | str = "cpu", rows: int = 0, weights: bool = False
    ) -> None:
        self.scores = torch.zeros(batch, vocab, device=device)
        self.counts = torch.zeros(batch, vocab, dtype=torch.int32, device=device)
        self.row_states = torch.empty(rows, _C.ROW_STATE_WORDS, dtype=torch.int64, device=device)
        self.weights = (
            torch.empty(batch, _C.WEIGHT_PLANES, vocab, dtype=torch.int64, device=device) if weights else None
        )

    def part(self, batch: int, rows: int) -> VerifyWorkspace:
        """A smaller one in the same memory."""
        part = object.__new__(VerifyWorkspace)
        part.scores, part.counts, part.row_states = self.scores[:batch], self.counts[:batch], self.row_states[:rows]
        part.weights = None if self.weights is None else self.weights[:batch]
        return part


def verify_tree(
    scores: torch.Tensor,
    tree: TreeBatch,
    params: SamplingTable,
    history: TokenHistory,
    workspace: VerifyWorkspace | None = None,
    rule: Rule | None = None,
    draft: DraftLogits | None = None,
) -> Accepted:
    """Walks every tree by a rule; `match`, the default, draws the target's token at each node and follows it while the
    tree has it.

    scores: logits float32 [M, V], or the target's token at every node, int32 [M], where it is known already (greedy
    decoding under `match`; -1 for a row that has none; this needs a workspace).  draft: the distributions children were
    drafted from. Under `match` the drawn token depends on (seed, position, distribution) alone, so the tokens committed
    are those of plain decoding.
    Raises ValueError for NaN or infinite scores on the walk, the target's or those the drafter hands to a rule that
    reads them (-inf is a masked token), or a parent that is no earlier node. CUDA, where nothing waits for the device,
    ends such a walk with bonus -1 instead, never visits rows whose token is -1 (padding), and gives a request whose
    root is padding (idle) path_length 0 and bonus -1.
    """
    batch, device, rule = len(params.seed), scores.device, rule or Match()
    logits, drawn = (None, scores) if scores.dtype == torch.int32 else (scores, None)
    if workspace is None:
        if logits is None:
            raise ValueError("workspace: tokens instead of logits need one, which has the size of the vocabulary")
        rows, vocab = logits.shape
        workspace = VerifyWorkspace(batch, vocab, device=device, rows=rows, weights=not isinstance(rule, Match))
    accepted = Accepted(
        path=torch.empty(batch, tree.nodes, dtype=torch.int32, device=device),
        path_length=torch.empty(batch, dtype=torch.int32, device=device),
        bonus=torch.empty(batch, dtype=torch.int32, device=device),
        relaxed=torch.empty(batch, dtype=torch.int32, device=device),
    )
    distributions: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None)
    if draft is not None:
        distributions = (draft.logits, draft.rows, draft.index)
    _C.verify_tree(
        *(logits, drawn, tree.tokens, tree.parents, tree.row_start),
        *(params.columns(), history.columns()),
        *distributions,
        draft is not None and draft.replacement,
        *(accepted.path, accepted.path_length, accepted.bonus, accepted.relaxed),
        *(workspace.scores, workspace.counts),
        workspace.row_states[: len(logits)] if logits is not None and len(workspace.row_states) else None,
        workspace.weights,
        rule.kernel,
        rule.options,
    )
    return accepted


def verify_tree_on_host(scores, tree, params, history, workspace=None, rule=None, draft=None) -> Accepted:
    """verify_tree for scores on another device: copies them to the host, where tree and history are read anyway."""
    tokens, parents, depths = tree.tokens.cpu(), tree.parents.cpu(), tree.depths.cpu()
    host = TreeBatch(tokens, parents, depths, tree.row_start.cpu(), None, tree.nodes)
    return verify_tree(scores.cpu(), host, params, history, workspace, rule, draft and draft.to(torch.device("cpu")))


def verify_tree_reference(logits, tree, params, history, workspace=None) -> Accepted:
    starts, batch = tree.row_start.tolist(), len(params.seed)
    paths, bonuses = [], []
    for b in range(batch):
        tokens = tree.tokens[starts[b] : starts[b + 1]].tolist()
        parents = tree.parents[starts[b] : starts[b + 1]].tolist()
        committed = history.tokens[b, : int(history.length[b])].tolist()
        prompt = int(history.prompt_length[b])
        node, path = 0, [0]
        while True:
            row = logits[starts[b] + node].double()
            drawn = draw_reference(row, params, b, [*committed, *(tokens[i] for i in path[1:])], prompt)
            children = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == drawn]
            if not children:
                break
            node = children[0]
            path.append(node)
        paths.append(path)
        bonuses.append(drawn)
    columns = max((starts[b + 1] - starts[b] for b in range(batch)), default=0)
    return Accepted(
        path=torch.tensor([[*p, *[-1] * (columns - len(p))] for p in paths], dtype=torch.int32),
        path_length=torch.tensor([len(p) for p in paths], dtype=torch.int32),
        bonus=torch.tensor(bonuses, dtype=torch.int32),
        relaxed=torch.zeros(batch, dtype=torch.int32),
    )


def draw_reference(scores: torch.Tensor, params: SamplingTable, b: int, tokens: Sequence[int], prompt: int) -> int:
    """The token at one node from float64 scores [V]; tokens: the committed ones (`prompt` of them given), the path."""
    probs = target_probs_reference(scores, params, b, tokens, prompt)
    if float(params.temperature[b]) == 0:
        return int(probs.argmax())  # torch takes the lowest index of equal maxima
    return noise.draw(probs, seed=int(params.seed[b]), position=len(tokens))


def target_probs_reference(
    scores: torch.Tensor, params: SamplingTable, b: int, tokens: Sequence[int], prompt: int
) -> torch.Tensor:
    """The processed distribution at one node, float64 [V]; one-hot at temperature 0."""
    scores = scores.clone()
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
    order = weights.argsort(descending=True, stable=True)  # equal weights: lower token first
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
