"""Verification: walks the drafted trees with the target's logits.

Shapes: M rows (nodes of all requests), B requests, V vocabulary, N columns of a path, R rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from specengine import _C
from specengine.draft_trees.token_masks import unpack_masks
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.ops.sampling_table import SamplingTable, TokenHistory, sampled_trees
from specengine.ops.target_distribution import draw_reference
from specengine.rules.base import Rule
from specengine.rules.lossless import Match
from specengine.utils.host_memory import is_host

NO_DRAFT_LOGITS = _C.DraftLogits(None, None, None, False)


@dataclass(frozen=True)
class Accepted:
    """The tokens that a cycle committed.

    path: int32 [B, N], node indices, root first, then -1.  path_length: int32 [B], root included, so it is also the
    number of tokens committed.  bonus: int32 [B], negative where the walk ends at a node without a token.
    relaxed: int32 [B], accepted tokens that the exact rule would have refused.
    """

    path: torch.Tensor
    path_length: torch.Tensor
    bonus: torch.Tensor
    relaxed: torch.Tensor

    @staticmethod
    def empty(batch: int, nodes: int, device: torch.device | str = "cpu") -> Accepted:
        """Room for the paths of `batch` requests with at most `nodes` nodes each."""
        path = torch.empty(batch, nodes, dtype=torch.int32, device=device)
        return Accepted(path, *(torch.empty(batch, dtype=torch.int32, device=device) for _ in range(3)))

    @cached_property
    def native(self) -> _C.AcceptedPaths:
        """The tensors as the ops take them."""
        return _C.AcceptedPaths(self.path, self.path_length, self.bonus, self.relaxed)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The tensors' memory, on the CPU: numpy writes a few integers faster than a tensor does."""
        return tuple(column.numpy() for column in self.native)


@dataclass(frozen=True)
class VerifyWorkspace:
    """Scratch of verify_tree for a batch size.

    scores: float32 [B, V] and counts: int32 [B, V], on CUDA zero between calls.  row_states: int64 [R,
    ROW_STATE_WORDS], only CUDA reads them: `match` needs them, other rules are faster with them.  weights: int64
    [B, 4, V], only rules other than `match` need them.
    outcomes: by the columns of a path; on the CPU calls reuse what earlier ones have returned. None: they do not.
    """

    scores: torch.Tensor
    counts: torch.Tensor
    row_states: torch.Tensor | None
    weights: torch.Tensor | None
    outcomes: dict[int, Accepted] | None = None

    @staticmethod
    def empty(
        batch: int, vocab: int, *, device: torch.device | str = "cpu", rows: int = 0, weights: bool = False
    ) -> VerifyWorkspace:
        """Scratch for `batch` requests and up to `rows` rows of logits; weights: whether a rule may need them."""
        shape = (batch, _C.WEIGHT_PLANES, vocab)
        return VerifyWorkspace(
            scores=torch.zeros(batch, vocab, device=device),
            counts=torch.zeros(batch, vocab, dtype=torch.int32, device=device),
            row_states=torch.empty(rows, _C.ROW_STATE_WORDS, dtype=torch.int64, device=device) if rows else None,
            weights=torch.empty(shape, dtype=torch.int64, device=device) if weights else None,
            outcomes={} if is_host(torch.device(device)) else None,
        )

    def part(self, batch: int, rows: int) -> VerifyWorkspace:
        """A smaller workspace in the same memory."""
        states = None if self.row_states is None else self.row_states[:rows]
        weights = None if self.weights is None else self.weights[:batch]
        return VerifyWorkspace(self.scores[:batch], self.counts[:batch], states, weights)

    def outcome(self, nodes: int) -> Accepted:
        """Room for paths of `nodes` nodes."""
        if self.outcomes is None:
            return Accepted.empty(len(self.scores), nodes, self.scores.device)
        if nodes not in self.outcomes:
            self.outcomes[nodes] = Accepted.empty(len(self.scores), nodes)
        return self.outcomes[nodes]


def verify_tree(
    scores: torch.Tensor,
    tree: TreeBatch,
    params: SamplingTable,
    history: TokenHistory,
    workspace: VerifyWorkspace | None = None,
    rule: Rule | None = None,
    draft: DraftLogits | None = None,
    masks: torch.Tensor | None = None,
    raises: bool = True,
) -> Accepted:
    """Walks every tree by a rule. `match`, the default, draws the target's token at each node and follows it while the
    tree has it.

    scores: logits float32 [M, V], or on the CPU the target's token at every node, int32 [M]; -1 marks a row without
    one. Tokens serve greedy decoding under `match`.  draft: the distributions from which the drafter drew children.
    masks: int32 [M, ceil(V / 32)], the tokens that each node allows (see draft_trees.token_masks); None: all. A
    forbidden token has score -inf before the sampling parameters, and weight 0 in the draft distribution after them. A
    forbidden node is no child, so a tree may be cut by its masks before the pass, or not at all.
    Under `match` a draw depends on its node's distribution and its noise alone, so the tokens committed are those of
    plain decoding. The noise has two levels: the first is keyed (seed, position, block of 64 tokens), the second (seed,
    position, token). Acceptance coins are keyed (seed, root position, node), on a stream of their own.
    Raises ValueError for tokens with masks. A parent has to be an earlier node.
    A walk has a negative bonus at NaN or infinite scores (-inf is a masked token), at such scores of the drafter if the
    rule reads them, and at a mask that leaves no token. raises: makes that a ValueError, worded by without_token(); not
    on CUDA, where the host does not wait for the device. CUDA never visits rows whose token is -1 (padding); an idle
    request, whose root is padding, gets path_length 0 and bonus -1.
    """
    if scores.dtype == torch.int32:
        if masks is not None:
            raise ValueError("scores: expected logits, as there are masks, got the target's tokens")
        accepted = _follow(scores.tolist(), tree, workspace or VerifyWorkspace.empty(len(params.seed), 0))
        return _checked(accepted, tree, history, draft) if raises else accepted
    device, rule = scores.device, rule or Match()
    if workspace is None:
        (rows, vocab), weights = scores.shape, not isinstance(rule, Match)
        workspace = VerifyWorkspace.empty(len(params.seed), vocab, device=device, rows=rows, weights=weights)
    accepted = workspace.outcome(tree.nodes)
    row_states = None if workspace.row_states is None else workspace.row_states[: len(scores)]
    _C.verify_tree(
        scores,
        sampled_trees(tree, params, history),
        NO_DRAFT_LOGITS if draft is None else _C.DraftLogits(draft.logits, draft.rows, draft.index, draft.replacement),
        masks,
        accepted.native,
        _C.VerifyWorkspace(workspace.scores, workspace.counts, row_states, workspace.weights),
        rule.kernel,
        rule.options,
    )
    return _checked(accepted, tree, history, draft) if raises and is_host(device) else accepted


def without_token(
    b: int, accepted: Accepted, tree: TreeBatch, history: TokenHistory, draft: DraftLogits | None = None
) -> str:
    """Says why the walk of request b, with a negative bonus, has no token."""
    reason, last = int(accepted.bonus[b]), int(accepted.path_length[b]) - 1
    row = int(tree.row_start[b]) + int(accepted.path[b, last])
    where = f"(request {b}, position {int(history.length[b]) + last})"
    if reason == _C.NO_ALLOWED:
        return f"masks: row {row} {where} allows no token with a finite score"
    if reason == _C.NO_DRAFT and draft is not None:
        name, row, so = "draft_logits", int(draft.rows[row]), "no child can have been drafted from it"
    else:
        name, so = "logits", "there is no token to draw"
    return f"{name}: row {row} {where} has NaN or infinite scores, so {so}"


def _checked(accepted: Accepted, tree: TreeBatch, history: TokenHistory, draft: DraftLogits | None) -> Accepted:
    for b, token in enumerate(accepted.bonus.tolist()):
        if token < 0:
            raise ValueError(without_token(b, accepted, tree, history, draft))
    return accepted


def _follow(chosen: list[int], tree: TreeBatch, workspace: VerifyWorkspace) -> Accepted:
    """Walks every tree along the target's tokens, one per node."""
    accepted = workspace.outcome(tree.nodes)
    paths, lengths, bonuses, relaxed = accepted.arrays
    tokens, parents, starts = tree.tokens.tolist(), tree.parents.tolist(), tree.row_start.tolist()
    for b, (first, end) in enumerate(pairwise(starts)):
        node, path = 0, [0]
        for child in range(1, end - first):  # a child comes after its parent
            if parents[first + child] == node and tokens[first + child] == chosen[first + node]:
                node = child
                path.append(child)
        bonus = chosen[first + node]
        for at, node in enumerate(path):
            paths[b, at] = node
        if len(path) < tree.nodes:
            paths[b, len(path) :] = -1
        lengths[b], bonuses[b], relaxed[b] = len(path), bonus, 0
    return accepted


def verify_tree_on_host(
    scores, tree, params, history, workspace=None, rule=None, draft=None, masks=None, raises=True
) -> Accepted:
    """verify_tree for scores on another device: copies them to the host, where tree and history are read anyway."""
    scores, masks = scores.cpu(), None if masks is None else masks.cpu()
    tokens, parents, depths = tree.tokens.cpu(), tree.parents.cpu(), tree.depths.cpu()
    host = TreeBatch(tokens, parents, depths, tree.row_start.cpu(), None, tree.nodes)
    draft = draft and draft.to(torch.device("cpu"))
    return verify_tree(scores, host, params, history, workspace, rule, draft, masks, raises)


def verify_tree_reference(logits, tree, params, history, workspace=None, masks=None) -> Accepted:
    """Rule `match` in PyTorch."""
    allowed = None if masks is None else unpack_masks(masks, logits.shape[1])
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
            allows = None if allowed is None else allowed[starts[b] + node]
            drawn = draw_reference(row, params, b, [*committed, *(tokens[i] for i in path[1:])], prompt, allows)
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
